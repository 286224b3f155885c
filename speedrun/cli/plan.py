"""`speedrun plan`: what a recipe needs on devices that need not be here."""

from typing import TYPE_CHECKING

import click
import msgspec

from speedrun import devices as kinds
from speedrun.cli.options import Integer, Number, example, json_option, parse_settings, settings_option
from speedrun.errors import SpeedrunError

if TYPE_CHECKING:
    from speedrun.plan import Plan, StagePlan


@click.command(
    epilog=example(
        "speedrun plan --recipe record21 --device-kind h100 --devices 8",
        "speedrun plan --recipe webmini --device-kind a100 --compile",
        "speedrun plan --recipe smoke --dollars 2.50 --json",
    )
)
@click.option("--recipe", metavar="NAME", default="smoke", show_default=True, help="What to train.")
@click.option(
    "--device-kind",
    "kind",
    default="h100",
    show_default=True,
    metavar="KIND",
    help=", ".join(kinds.DEVICES) + ".",
)
@click.option("--devices", type=Integer(1), default=8, show_default=True, metavar="N", help="In one machine.")
@click.option(
    "--microbatches",
    type=Integer(1),
    default=8,
    show_default=True,
    metavar="N",
    help="Parts of a step's batch.",
)
@settings_option
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Compile the step for the device and read its program. No GPU needed.",
)
@click.option("--dollars", type=Number(0), metavar="X", help="Of one device and hour, for the cost.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    recipe: str,
    kind: str,
    devices: int,
    microbatches: int,
    settings: tuple[str, ...],
    compiled: bool,
    dollars: float | None,
    as_json: bool,
) -> None:
    """Say what a recipe needs on devices that need not be here: memory, floors, expected time, cost.

    Exits with 1 if it does not fit into memory, and says what would.
    """
    kinds.load(kind)
    overrides = parse_settings(settings)
    # JAX is imported only now: nothing above needs it, and an error above should not wait for it.
    from speedrun import plan as planning
    from speedrun import recipes

    chosen = recipes.load(recipe).override(overrides)
    plan = planning.plan(
        chosen, kind, devices, microbatches, "compiled program" if compiled else "arithmetic"
    )
    too_large = None
    if not plan.fits:
        what_fits = planning.advice(chosen, devices, plan.microbatches, plan.memory_limit_bytes)
        too_large = (
            f"{recipe} does not fit: needs {_gb(plan.memory_bytes)}, {plan.device} has "
            f"{_gb(plan.memory_limit_bytes)}; try {what_fits}"
        )
    if as_json:
        click.echo(_encoded(plan, dollars, too_large))
        ctx.exit(0 if plan.fits else 1)
    click.echo("\n".join(_lines(plan, dollars, planning.ERROR)))
    if too_large:
        raise SpeedrunError(too_large)


def _lines(plan: "Plan", dollars: float | None, error: float) -> list[str]:
    cost = "" if dollars is None else f" | ${plan.device_hours * dollars:,.2f}"
    return [
        f"plan   {plan.recipe} on {plan.num_devices} x {plan.device} | {plan.microbatches} microbatches | "
        f"by {'the compiled program' if plan.basis == 'compiled program' else 'arithmetic'}",
        f"size   {plan.num_params:,} parameters | {plan.flops_per_token / 1e6:,.1f} MFLOP per token | "
        f"state {_gb(plan.state_bytes)} per device",
        *(line for stage in plan.stages for line in _stage_lines(stage, plan, error)),
        f"val    memory about {_gb(plan.validation_bytes)}",
        f"total  {plan.total_s:,.1f} s +-{error:.0%}, without starting kernels | "
        f"{plan.device_hours:.3f} device-hours{cost}",
    ]


def _stage_lines(stage: "StagePlan", plan: "Plan", error: float) -> list[str]:
    sent = f"gathers {_gb(stage.gathered_bytes)}, scatters {_gb(stage.scattered_bytes)}"
    return [
        f"stage  {stage.num_steps:,} steps x {stage.batch_tokens:,} tokens | "
        f"memory {_gb(stage.memory_bytes)} of {_gb(plan.memory_limit_bytes)}",
        f"floor  compute {_ms(stage.compute_floor_s)} | traffic {_ms(stage.traffic_floor_s)} "
        f"({_gb(stage.traffic_bytes)}) | communication {_ms(stage.communication_floor_s)} ({sent})",
        f"step   {_ms(stage.step_s)} +-{error:.0%} | MFU {stage.compute_floor_s / stage.step_s:.0%}",
    ]


def _encoded(plan: "Plan", dollars: float | None, too_large: str | None) -> bytes:
    derived = {
        "fits": plan.fits,
        "error": too_large,
        "memory_bytes": plan.memory_bytes,
        "total_s": plan.total_s,
        "device_hours": plan.device_hours,
        "dollars": None if dollars is None else plan.device_hours * dollars,
    }
    return msgspec.json.encode({**msgspec.structs.asdict(plan), **derived})


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
