"""`speedrun profile`: where the time of a training step goes."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from speedrun.cli.options import Integer, example, json_option, parse_settings, settings_option
from speedrun.errors import UsageError

if TYPE_CHECKING:
    from speedrun.bench.profile import Profile, Row
    from speedrun.timeline import Usage

_GAPS = 3  #: shown of each device
_SHOWN_SHARE = 0.01


@click.command(
    epilog=example(
        "speedrun profile --recipe smoke",
        "speedrun profile --recipe record21 --devices 1 --first-step 1769 --out trace",
    )
)
@click.option("--recipe", metavar="NAME", default="smoke", show_default=True, help="What to train.")
@click.option("--devices", type=Integer(1), metavar="N", help="Default: all there are.")
@click.option("--microbatches", type=Integer(1), default=8, show_default=True, help="Parts of a batch.")
@click.option("--attention", default="auto", show_default=True, metavar="FORM", help="Its kernels.")
@click.option("--steps", type=Integer(1), default=3, show_default=True, help="How many to trace.")
@click.option("--first-step", type=Integer(0), default=0, show_default=True, help="Of the schedule.")
@click.option("--top", type=Integer(1), default=20, show_default=True, help="Rows of the table.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep the trace there, for XProf or Perfetto.",
)
@settings_option
@json_option
def command(
    *,
    recipe: str,
    devices: int | None,
    microbatches: int,
    attention: str,
    steps: int,
    first_step: int,
    top: int,
    out: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Trace training steps on random ids: the longest operations, idle gaps, collectives hidden and not.

    Bytes are those of the compiled program, as if nothing were cached.
    """
    overrides = parse_settings(settings)
    import jax

    from speedrun import mesh, recipes
    from speedrun.bench.profile import profile
    from speedrun.step import Program

    chosen = recipes.load(recipe).override(overrides)
    if first_step >= chosen.num_steps:
        raise UsageError(f"--first-step {first_step}: {recipe} has {chosen.num_steps} steps; need one below")
    mesh.prepare("any")
    program = Program(chosen, mesh.make_mesh(devices or len(jax.devices())), microbatches, attention)
    found = profile(program, num_steps=steps, first_step=first_step, folder=out)
    if as_json:
        rows, usage = [row._asdict() for row in found.rows[:top]], [_facts(one) for one in found.devices]
        click.echo(
            msgspec.json.encode({**found._asdict(), "rows": rows, "devices": usage, "shares": found.shares})
        )
        return
    kind = program.mesh.devices.flat[0].device_kind
    click.echo(f"step    {found.step_ms:.2f} ms, {steps} steps of {recipe} on {program.num_devices} x {kind}")
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in found.shares.items() if share >= _SHOWN_SHARE)
    for line in [*map(_device, found.devices), f"kinds   {shares}", *_table(found, top)]:
        click.echo(line)
    if out is not None:
        click.echo(f"trace   {out}")


def _facts(usage: "Usage") -> dict[str, object]:
    gaps = [gap._asdict() for gap in usage.gaps[:_GAPS]]
    return {**usage._asdict(), "idle_ns": usage.idle_ns, "gaps": gaps}


def _device(usage: "Usage") -> str:
    parts = {
        "computes": usage.compute_ns,
        "sends": usage.collective_ns,
        "hidden behind computing": usage.hidden_ns,
        "idle": usage.idle_ns,
    }
    shares = ", ".join(f"{name} {ns / usage.span_ns:.1%}" for name, ns in parts.items())
    gaps = [
        f"\n        idle {gap.length_ns / 1e6:.3f} ms after {gap.after}, before {gap.before}"
        for gap in usage.gaps[:_GAPS]
    ]
    return f"dev {usage.device:<4}{shares}{''.join(gaps)}"


def _table(found: "Profile", top: int) -> list[str]:
    """The longest operations, then all others in one row."""
    shown, rest = found.rows[:top], found.rows[top:]
    lines = [
        f"{'ms':>9} {'share':>6} {'calls':>6} {'GB/s':>6}  {'kind':<24} name, source",
        *map(_line, shown),
    ]
    if rest:
        ms, share = sum(row.ms for row in rest), sum(row.share for row in rest)
        lines.append(f"{ms:9.3f} {share:6.1%} {'':>6} {'':>6}  {len(rest)} others")
    return lines


def _line(row: "Row") -> str:
    rate = "" if row.gb_per_s is None else f"{row.gb_per_s:.0f}"
    kind = row.kind if len(row.kind) <= 24 else f"{row.kind[:23]}~"
    return (
        f"{row.ms:9.3f} {row.share:6.1%} {row.calls:6.1f} {rate:>6}  {kind:<24} {row.name} {row.source[-70:]}"
    )
