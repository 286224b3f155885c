"""`speedrun plan`: what a recipe needs on devices that need not be here."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from speedrun.cli.options import (
    Decorator,
    Integer,
    Number,
    example,
    json_option,
    parse_settings,
    settings_option,
)
from speedrun.ground import devices as kinds
from speedrun.ground import track as tracks
from speedrun.ground.errors import SpeedrunError, UsageError

if TYPE_CHECKING:
    from speedrun.predict.cost import Line
    from speedrun.predict.plan import Basis, Plan, StagePlan
    from speedrun.study.budget import Budget

_RECORDS = Path("records")


#: `--device-kind KIND`, as the argument `kind`.
device_kind_option: Decorator = click.option(
    "--device-kind",
    "kind",
    default="h100",
    show_default=True,
    metavar="KIND",
    help=", ".join(kinds.DEVICES) + ".",
)


@click.command(
    epilog=example(
        "speedrun plan --recipe record21 --device-kind h100 --devices 8",
        "speedrun plan --recipe webmini --device-kind a100 --arithmetic",
        "speedrun plan --track main-8xh100 --runs 4 --dollars 2.50",
    )
)
@click.option("--recipe", metavar="NAME", help="What to train. Default: the track's, or smoke.")
@click.option("--track", metavar="NAME", help="Say also what a batch on it takes: data, time, money.")
@click.option("--runs", type=Integer(1), metavar="N", help="Of that batch. Default: as many as a rank takes.")
@device_kind_option
@click.option("--devices", type=Integer(1), metavar="N", help="In one machine. Default: the track's, or 8.")
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
    "--compile/--arithmetic",
    "compiled",
    default=None,
    help="Read the step's compiled program, or estimate it in a second. Default: compile, where a compiler is "
    "installed. Neither needs a GPU.",
)
@click.option("--dollars", type=Number(0), metavar="X", help="Of one device and hour, for the cost.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    recipe: str | None,
    track: str | None,
    runs: int | None,
    kind: str,
    devices: int | None,
    microbatches: int,
    settings: tuple[str, ...],
    compiled: bool | None,
    dollars: float | None,
    as_json: bool,
) -> None:
    """Say what a recipe needs on devices that need not be here: memory, floors, expected time, cost.

    Exits with 1 if it does not fit into memory, and says what would.
    """
    kinds.load(kind)
    rules = None if track is None else tracks.load(track)
    if runs is not None and rules is None:
        raise UsageError(f"--runs {runs}: of a batch on which track? add --track NAME")
    on_gpu = rules is None or rules.rules.platform == "gpu"
    unused = {"--devices": devices, "--compile": compiled}
    if given := [option for option, value in unused.items() if value and not on_gpu]:
        raise UsageError(f"{given[0]}: {track} asks for no GPU; leave it out, or leave out --track")
    overrides = parse_settings(settings)
    name = recipe or (rules.recipe if rules else "smoke")
    # JAX is imported only now: nothing above needs it, and an error above should not wait for it.
    from speedrun.predict import plan as planning
    from speedrun.science import recipes
    from speedrun.study import budget as budgets

    chosen = recipes.load(name).override(overrides)
    plan, too_large, batch = None, None, None
    if on_gpu:
        num_devices = devices or (rules.rules.num_devices if rules else 8)
        plan = planning.plan(chosen, kind, num_devices, microbatches, _basis(compiled=compiled))
        if not plan.fits:
            what_fits = planning.advice(chosen, num_devices, plan.microbatches, plan.memory_limit_bytes)
            too_large = (
                f"{name} does not fit: needs {gb(plan.memory_bytes)}, {plan.device} has "
                f"{gb(plan.memory_limit_bytes)}; try {what_fits}"
            )
    if rules is not None:
        num_runs = runs or max(2, rules.rules.min_runs)
        batch = budgets.budget(rules, chosen, num_runs, _RECORDS, plan, dollars=dollars)
    batch_lines = [] if batch is None else budgets.lines(batch, planning.ERROR)
    if as_json:
        click.echo(_encoded(plan, dollars, too_large, batch, batch_lines))
        ctx.exit(1 if too_large else 0)
    click.echo("\n".join([*(_lines(plan, dollars, planning.ERROR) if plan else []), *batch_lines]))
    if too_large:
        raise SpeedrunError(too_large)


def _basis(*, compiled: bool | None) -> "Basis":
    """What was asked for; else the compiled program, where it can be had."""
    from speedrun.predict.deviceless import missing_wheels

    if compiled is None and (missing := missing_wheels()):
        click.echo(f"plan: no compiler here ({', '.join(missing)} missing): by arithmetic", err=True)
        return "arithmetic"
    return "arithmetic" if compiled is False else "compiled program"


def _lines(plan: "Plan", dollars: float | None, error: float) -> list[str]:
    cost = "" if dollars is None else f" | ${plan.device_hours * dollars:,.2f}"
    return [
        f"plan   {plan.recipe} on {plan.num_devices} x {plan.device} | {plan.microbatches} microbatches | "
        f"by {'the compiled program' if plan.basis == 'compiled program' else 'arithmetic'}",
        f"size   {plan.num_params:,} parameters | {plan.flops_per_token / 1e6:,.1f} MFLOP per token | "
        f"state {gb(plan.state_bytes)} per device",
        *(line for stage in plan.stages for line in _stage_lines(stage, plan, error)),
        f"val    memory about {gb(plan.validation_bytes)}",
        f"total  {plan.total_s:,.1f} s +-{error:.0%} | {plan.device_hours:.3f} device-hours{cost}",
    ]


def _stage_lines(stage: "StagePlan", plan: "Plan", error: float) -> list[str]:
    sent = f"gathers {gb(stage.gathered_bytes)}, scatters {gb(stage.scattered_bytes)}"
    return [
        f"stage  {stage.num_steps:,} steps x {stage.batch_tokens:,} tokens | "
        f"memory {gb(stage.memory_bytes)} of {gb(plan.memory_limit_bytes)}",
        f"floor  compute {ms(stage.compute_floor_s)} | traffic {ms(stage.traffic_floor_s)} "
        f"({gb(stage.traffic_bytes)}) | communication {ms(stage.communication_floor_s)} ({sent})",
        f"step   {ms(stage.step_s)} +-{error:.0%} | {ms(stage.narrow_s)} with the smallest window, "
        f"{ms(stage.wide_s)} with the largest | MFU {stage.mfu:.0%}",
        f"       {'kind':<13} {'ms':>7}  {'bound':<12} {'TFLOP':>7} {'Ginstr':>7} {'GB':>7} {'kernels':>7}",
        *(_line(line) for line in stage.lines),
    ]


def _line(line: "Line") -> str:
    return (
        f"       {line.kind:<13} {line.seconds * 1e3:>7.2f}  {line.bound:<12} {line.flops / 1e12:>7.2f} "
        f"{line.instructions / 1e9:>7.1f} {line.num_bytes / 1e9:>7.2f} {line.starts:>7,.0f}"
    )


def _encoded(
    plan: "Plan | None",
    dollars: float | None,
    too_large: str | None,
    batch: "Budget | None",
    batch_lines: list[str],
) -> bytes:
    """The plan's facts by themselves, and below `batch` what is known of one."""
    facts: dict[str, object] = {"error": too_large}
    if plan is not None:
        facts |= msgspec.structs.asdict(plan) | {
            "fits": plan.fits,
            "memory_bytes": plan.memory_bytes,
            "total_s": plan.total_s,
            "device_hours": plan.device_hours,
            "dollars": None if dollars is None else plan.device_hours * dollars,
        }
    if batch is not None:
        derived = {"total_s": batch.total_s, "dollars": batch.dollars, "said": batch_lines}
        facts["batch"] = msgspec.structs.asdict(batch) | derived
    return msgspec.json.encode(facts)


def gb(num_bytes: float) -> str:
    """Bytes as a person reads them."""
    return f"{num_bytes / 1e9:.2f} GB"


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:,.2f} ms"
