"""`speedrun scale`: how a step goes on many nodes, from programs compiled for them and a model that is written down."""

from typing import TYPE_CHECKING

import click
import msgspec

from speedrun.cli.options import Integer, Number, example, json_option, parse_settings, settings_option
from speedrun.cli.plan import device_kind_option, gb, ms
from speedrun.ground import devices as kinds
from speedrun.ground.errors import UsageError

if TYPE_CHECKING:
    from speedrun.ground.devices import Device
    from speedrun.predict.scaling import Scale
    from speedrun.science.recipe import Recipe

_MOST_NODES = 1024  #: a description of each device is made


@click.command(
    epilog=example(
        "speedrun scale --recipe record21 --nodes 1,2,8,32",
        "speedrun scale --recipe record21 --nodes 1,4 --network 200 --json",
    )
)
@click.option("--recipe", metavar="NAME", default="record21", show_default=True, help="What to train.")
@click.option(
    "--nodes",
    metavar="N,N",
    default="1,2,8,32",
    show_default=True,
    help="Machines with as many devices and tokens each.",
)
@device_kind_option
@click.option("--devices", type=Integer(1), default=8, show_default=True, metavar="N", help="In one machine.")
@click.option(
    "--network",
    type=Number(0, min_open=True),
    metavar="GBIT",
    help="Between machines, per second, device and direction. Default: of the kind.",
)
@click.option(
    "--microbatches", type=Integer(1), default=8, show_default=True, metavar="N", help="Of one machine."
)
@settings_option
@json_option
def command(
    *,
    recipe: str,
    nodes: str,
    kind: str,
    devices: int,
    network: float | None,
    microbatches: int,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say how a step scales when every node brings its own tokens: collectives, bytes, efficiency.

    The step is compiled for all the nodes; none need be here, and nothing is run. docs/scaling.md has the model.
    """
    device, overrides, numbers = kinds.load(kind), parse_settings(settings), _numbers(nodes)
    from speedrun.science import recipes  # JAX; an error above should not wait for it

    device = device._replace(network_rate=network * 1e9 / 8) if network else device
    scales = _scales(recipes.load(recipe).override(overrides), device, kind, devices, microbatches, numbers)
    click.echo(_encoded(recipe, device, scales) if as_json else "\n".join(_table(recipe, device, scales)))


def _numbers(nodes: str) -> list[int]:
    """In order, with the one node that all others are compared with."""
    words = nodes.split(",")
    if not all(word.isdecimal() and len(word) < 5 and 0 < int(word) <= _MOST_NODES for word in words):
        raise UsageError(
            f"--nodes {nodes!r}; need numbers up to {_MOST_NODES} with commas between them, as in --nodes 1,2,8,32"
        )
    return sorted({1, *map(int, words)})


def _scales(
    recipe: "Recipe", device: "Device", kind: str, devices: int, microbatches: int, numbers: list[int]
) -> "list[Scale]":
    """Compiles the step for each number of nodes."""
    from speedrun.predict.scaling import scale

    if not device.network_rate and len(numbers) > 1:
        raise UsageError(f"the network between machines of {device.name} is not known; pass --network GBIT")
    scales = []
    for number in numbers:
        click.echo(f"compiling for {number} x {devices} {device.name}", err=True)
        scales.append(scale(recipe, device, kind, devices, number, microbatches))
    return scales


def _table(recipe: str, device: "Device", scales: "list[Scale]") -> list[str]:
    one = scales[0]
    return [
        f"scale  {recipe} on nodes of {one.num_devices} x {device.name} | "
        f"{one.batch_tokens // one.num_devices:,} tokens a device and step | by the compiled programs; nothing was run",
        f"rates  inside a node {device.link_rate / 1e9:g} GB/s, between nodes {device.network_rate / 1e9:g} GB/s, each "
        "way and device | docs/scaling.md has the model",
        f"{'nodes':>5} {'devices':>7} {'tokens/step':>11}  {'inside':>6} {'between':>7} {'all':>3}  {'link':>8} "
        f"{'network':>8}  {'sending':>8} {'waiting':>8} {'step':>9}  {'efficiency':>10} {'unhidden':>8}",
        *(_row(scale, one) for scale in scales),
    ]


def _row(scale: "Scale", one: "Scale") -> str:
    """A line of the table: collectives by what they send between, bytes of a device, times, efficiencies."""
    counts = {span: sum(sent.kinds.values()) for span, sent in scale.sent.items()}
    sending_s, waiting_s = (
        sum(getattr(sent, name) for sent in scale.sent.values()) for name in ("takes_s", "waited_s")
    )
    return (
        f"{scale.num_nodes:>5} {scale.num_devices:>7} {scale.batch_tokens:>11,}  "
        f"{counts['inside']:>6} {counts['between']:>7} {counts['all']:>3}  "
        f"{gb(scale.link_bytes):>8} {gb(scale.network_bytes):>8}  {ms(sending_s):>8} {ms(waiting_s):>8} "
        f"{ms(scale.step_s):>9}  {one.step_s / scale.step_s:>10.1%} {one.step_s / scale.unhidden_s:>8.1%}"
    )


def _encoded(recipe: str, device: "Device", scales: "list[Scale]") -> bytes:
    one = scales[0]
    rows = [
        {
            **msgspec.structs.asdict(scale),
            "step_s": scale.step_s,
            "unhidden_s": scale.unhidden_s,
            "efficiency": one.step_s / scale.step_s,
        }
        for scale in scales
    ]
    return msgspec.json.encode({"recipe": recipe, "device": device._asdict(), "nodes": rows})
