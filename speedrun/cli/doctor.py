"""`speedrun doctor`: what this machine can run, and the command to type next.

Checks go from what is needed first to what is needed last; JAX is imported only when its versions are right.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

import click
import msgspec

from speedrun import track as tracks
from speedrun.cli.options import example, json_option
from speedrun.data import inventory
from speedrun.errors import SpeedrunError
from speedrun.track import Track

SMOKE = "smoke-cpu"
NEED_BYTES = 2 * 10**9  #: the smoke data, a record and compiled programs fit well


class Check(NamedTuple):
    """One line of the table."""

    name: str
    found: str
    ok: bool
    needed: bool = True  #: for the smoke track to run here


@click.command(epilog=example("speedrun doctor", "speedrun doctor --json"))
@json_option
@click.pass_context
def command(ctx: click.Context, *, as_json: bool) -> None:
    """Say what this machine can run, and what to type next.

    Exits with 0 if the smoke track can run here (its data may still have to be made), else with 1.
    """
    checks = list(_check_software())
    if all(check.ok for check in checks):
        try:
            checks += _check_devices()
        except RuntimeError as error:  # what JAX raises when a driver or a plugin is broken
            checks.append(Check("devices", str(error).partition("\n")[0], ok=False))
    checks += [_check_disk(), *(_check_data(tracks.load(name)) for name in tracks.names())]
    ready = all(check.ok for check in checks if check.needed)
    following = _next(checks) if ready else "repair what is marked above, then: speedrun doctor"
    if as_json:
        report = {"ready": ready, "checks": [check._asdict() for check in checks], "next": following}
        click.echo(msgspec.json.encode(report))
    else:
        _print_table(checks)
        click.echo(f"next: {following}")
    ctx.exit(0 if ready else 1)


def _print_table(checks: list[Check]) -> None:
    """Ticks on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        for check in checks:
            click.echo(f"{_mark(check):<4}  {check.name}: {check.found}")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    signs = {"ok": "[green]✓[/]", "note": "[yellow]![/]", "bad": "[red]✗[/]"}
    table = Table(box=None, show_header=False, padding=(0, 1))
    for check in checks:
        table.add_row(signs[_mark(check)], check.name, escape(check.found))
    Console().print(table)


def _mark(check: Check) -> str:
    return "ok" if check.ok else "bad" if check.needed else "note"


def _check_software() -> Iterator[Check]:
    """Python and packages against the floors that the package itself declares."""
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        about, requirements = metadata.metadata("speedrun"), metadata.requires("speedrun") or []
    except metadata.PackageNotFoundError:
        yield Check("speedrun", "not installed; its floors are unknown; pip install -e .", ok=False)
        return
    yield _check_floor("python", version, f"python{about['Requires-Python']}")
    for requirement in requirements:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[<>=!~; ]", requirement)[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, f"missing; need {requirement}; pip install -e .", ok=False)
        else:
            yield _check_floor(name, version, requirement)


def _check_floor(name: str, version: str, requirement: str) -> Check:
    """One `>=`; more than that no requirement of ours says."""
    floor = requirement.partition(">=")[2]
    if _numbers(version) >= _numbers(floor):
        return Check(name, version, ok=True)
    return Check(name, f"{version}; need {requirement}; pip install -e .", ok=False)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _check_devices() -> Iterator[Check]:
    """Devices, one program over all of them, their speed, and the tracks they are enough for."""
    import jax

    from speedrun import health, mesh

    mesh.prepare("any")
    devices = jax.devices()
    over = mesh.make_mesh(len(devices))
    simulated = " (simulated)" if devices[0].platform == "cpu" else ""
    yield Check("devices", f"{len(devices)} x {devices[0].device_kind}{simulated}", ok=True)
    agree = health.all_devices_agree(over)
    yield Check(
        "collective",
        "a sum over the devices comes out right" if agree else "a sum over the devices is wrong",
        ok=agree,
    )
    yield Check("matmul", f"{health.matmul_gflops(over):,.0f} Gflop/s, all devices together", ok=True)
    for name in tracks.names():
        yield _check_track(tracks.load(name), devices)


def _check_track(track: Track, devices: list[Any]) -> Check:
    """Whether the track's hardware is here. CPU tracks simulate theirs."""
    rules = track.rules
    fits = rules.platform in ("any", "cpu") or (
        devices[0].platform == rules.platform and len(devices) >= max(rules.num_devices, 1)
    )
    found = "fits this machine" if fits else f"needs {rules.num_devices or 1} {rules.platform} devices"
    return Check(f"track {track.name}", f"{found}: {track.summary}", ok=fits, needed=track.name == SMOKE)


def _check_disk() -> Check:
    """Free space where the data goes; the folder may not exist yet."""
    root = inventory.data_folder(tracks.load(SMOKE), None).parent.absolute()
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free_bytes = shutil.disk_usage(there).free
    found = f"{free_bytes / 1e9:,.1f} GB free in {there}; need {NEED_BYTES / 1e9:.0f} GB"
    return Check("disk", found, ok=free_bytes >= NEED_BYTES)


def _check_data(track: Track) -> Check:
    """Whether the track's shards are here and look right. Never needed: they are one command away."""
    folder = inventory.data_folder(track, None)
    try:
        verified = inventory.verify(folder, track.data, full=False)
    except SpeedrunError as error:
        return Check(f"data {track.name}", str(error), ok=False, needed=False)
    tokens = sum(shard.tokens for shard in verified)
    found = f"{len(verified)} shards, {tokens:,} tokens in {folder}"
    return Check(f"data {track.name}", found, ok=True, needed=False)


def _next(checks: list[Check]) -> str:
    """From nothing to a first run."""
    if any(check.name == f"data {SMOKE}" and not check.ok for check in checks):
        return tracks.load(SMOKE).data.get
    return f"speedrun run --track {SMOKE}"
