"""`speedrun profile`: the time of a training step by operation."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedrun.cli import options as cli
from speedrun.cli.bench import asked_program, program_options

if TYPE_CHECKING:
    from speedrun.machine.profile import Profile, Row
    from speedrun.plan.timeline import Usage

_GAPS = 3  #: shown of each device
_SHOWN_SHARE = 0.01


@cli.new_command(
    "speedrun profile --recipe smoke",
    "speedrun profile --recipe record21 --devices 1 --first-step 1769 --out trace",
)
@program_options
@cli.option("--steps N", cli.COUNT, "Number of traced steps.", 3)
@cli.option("--top N", cli.COUNT, "Rows of the table.", 20)
@cli.option("--out DIR", cli.FOLDER, "Keep the trace, for XProf or Perfetto.")
def command(*, steps: int, first_step: int, top: int, out: Path | None, **asked: Any) -> cli.Answer:
    """Trace training steps on synthetic ids: longest operations, idle gaps, overlap of collectives.

    Bytes are those of the compiled program, without caching.
    """
    program = asked_program(first_step=first_step, **asked)
    from speedrun.machine.profile import profile

    found = profile(program, num_steps=steps, first_step=first_step, folder=out)
    rows, usage = [row._asdict() for row in found.rows[:top]], [_facts(one) for one in found.devices]
    facts = {**found._asdict(), "rows": rows, "devices": usage, "shares": found.shares}
    device = f"{program.num_devices} x {program.mesh.devices.flat[0].device_kind}"
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in found.shares.items() if share >= _SHOWN_SHARE)
    lines = [
        f"step    {found.step_ms:.2f} ms, {steps} steps of {program.recipe.name} on {device}",
        *map(_device, found.devices),
        f"kinds   {shares}",
        *_table(found, top),
        *([] if out is None else [f"trace   {out}"]),
    ]
    return cli.Answer(facts, lines)


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
    """Format the longest operations, then all others in one row."""
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
