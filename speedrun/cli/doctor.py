"""`speedrun doctor`: what this machine can run, and the command to type next."""

import subprocess
import sys
from typing import Any

import click
import msgspec

from speedrun.cli.options import json_option, new_command, option, price_option
from speedrun.doctor import fit
from speedrun.doctor.check import Check
from speedrun.doctor.checkup import checks as examine
from speedrun.ground import devices
from speedrun.ground import track as tracks
from speedrun.ground.console import clean

_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


@new_command("speedrun doctor", "speedrun doctor --track main-8xh100", "speedrun doctor --json")
@option(
    "--track NAME",
    str,
    "Only what this track needs. Default: all tracks, with a proposal for the hardest one that fits.",
)
@price_option
@json_option
@click.pass_context
def command(ctx: click.Context, *, track: str | None, dollars: float, as_json: bool) -> None:
    """Check what this machine can run, and print the next command.

    Exits with 0 if the track can run here (its data may be missing), else with 1.
    """
    rules, checks = tracks.load(track or fit.SMOKE), []
    for check in examine(rules, alone=track is not None):
        checks.append(check)
        if not as_json:
            _print(check)
    ready = all(check.ok for check in checks if check.needed)
    advice = fit.advice(checks, asked=track)
    again = "speedrun doctor" + (f" --track {track}" if track else "")
    following = advice.command if ready else f"repair what is marked above, then: {again}"
    cost = _cost(advice.track, dollars, checks) if ready else None
    if as_json:
        report = {
            "ready": ready,
            "track": rules.name,
            "qualifies": [check.name[6:] for check in checks if check.name[:6] == "track " and check.ok],
            "checks": [{**msgspec.structs.asdict(check), "mark": check.mark} for check in checks],
            "cost": cost,
            "next": following,
        }
        click.echo(msgspec.json.encode(report))
    else:
        if cost is not None:
            click.echo("\n".join(cost["said"]))
        click.echo(f"next: {following}")
    ctx.exit(0 if ready else 1)


def _print(check: Check) -> None:
    """Print a check at once, as some take seconds."""
    mark = click.style(f"{check.mark:<4}", fg=_COLOURS[check.mark])
    click.echo(f"{mark}  {clean(f'{check.name}: {check.found}')}")


def _cost(name: str, dollars: float, checks: list[Check]) -> dict[str, Any] | None:
    """Return the cost of a batch on a ranked track, from `speedrun plan` in a process without devices."""
    machine = next((check.facts for check in checks if check.name == "devices"), {})
    kind = devices.kind_of(str(machine.get("kind")))
    if not tracks.load(name).rules.ranked or kind is None:
        return None
    options = ["--track", name, "--device-kind", kind, "--dollars", str(dollars), "--json"]
    argv = [sys.executable, "-m", "speedrun", "plan", *options]
    done = subprocess.run(argv, capture_output=True, text=True)
    return msgspec.json.decode(done.stdout)["batch"] if done.returncode == 0 else None
