"""The cost model of a step on a device, for `speedrun plan`: compiled and by arithmetic.

A kernel takes the time of its tightest bound, after a fixed start:

    seconds = START_S + max(FLOPs / rate, instructions / rate, bytes / rate)

Each rate is the vendor's, times a share that programs reach (`shares`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from speedrun.base.accelerators import Device
from speedrun.data.synthetic import document_lengths
from speedrun.plan import hlo
from speedrun.plan.shares import GEMMS, KINDS, REACHES, START_S, Kind, Unit, errors
from speedrun.science.inputs import Static
from speedrun.science.kernels import attention_triton
from speedrun.science.kernels.attention import sight
from speedrun.science.kernels.choose import Kernels
from speedrun.science.params import Params
from speedrun.science.recipe import Batch, Stage
from speedrun.train.program import Program

#: What limits a kernel.
Bound = Literal["tensor cores", "instructions", "memory", "starts", "links"]
#: FLOPs of attention in a step of one device, for the tiles that its kernels visit: forward and backward.
Attention = np.ndarray

_LANES = 128  #: of a multiprocessor: four schedulers with 32 threads each

#: SASS instructions per element, by opcode, from XLA's loss head of record 21 on sm_90a: 41 per logit in its sum and 63
#: in its gradient; this table gave 38 and 65. XLA's tanh is a rational function with a division.
_INSTRUCTIONS = {"tanh": 22, "exponential": 8, "divide": 8, "log": 10, "rsqrt": 4, "sqrt": 8, "power": 30}
_INSTRUCTIONS |= {"logistic": 12, "sine": 20, "cosine": 20, "erf": 20, "remainder": 12, "clamp": 2}
_INSTRUCTIONS |= dict.fromkeys(("parameter", "constant", "broadcast", "bitcast", "reshape"), 0)
_INSTRUCTIONS |= dict.fromkeys(("tuple", "get-tuple-element"), 0)
#: Issue slots of a logit in each pass of `cross_entropy_mosaic`: tanh and exp2 take eight each, as an H100 has one
#: special-function unit for eight lanes. With these two, 8 instructions are in the sum and 11 or 14 in the gradient.
HEAD_SLOTS = 16
#: Instructions to read or write an element: address, access, conversion.
_ACCESS = 3


class Work(NamedTuple):
    """The work of kernels of one kind."""

    kind: Kind
    flops: float = 0.0
    unit: Unit = "bf16"
    instructions: float = 0.0  #: summed over threads
    num_bytes: float = 0.0  #: to and from memory
    starts: float = 1.0


class Line(msgspec.Struct, frozen=True):
    """All kernels of one kind in a step of one device."""

    kind: Kind
    seconds: float
    bound: Bound  #: of the kernels that take most of the time
    flops: float
    instructions: float
    num_bytes: float  #: to and from memory; of communication, to other devices
    starts: float  #: number of kernels
    error: float  #: of `seconds`, relative


def mean_attention(program: Program, stage: Stage) -> Attention:
    """Return the FLOPs of attention in a step of one device, in the mean over the windows of a stage.

    The model is traced with kernels that only record their calls. Tiles are those of the Triton kernels, counted on
    documents with the lengths of FineWeb's.
    """
    windows = _inputs(program, stage).items()
    parts = [_attention(program, stage, static) * (steps / stage.num_steps) for static, steps in windows]
    return np.sum(parts, axis=0)


def attention_at(program: Program, step: int) -> Attention:
    """Return the FLOPs of attention in one step of one device."""
    stage = program.recipe.stages[program.recipe.stage_of(step)]
    return _attention(program, stage, program.step.plan.static_at(step, integers=True))


def _attention(program: Program, stage: Stage, static: Static) -> Attention:
    sequences = stage.num_sequences / program.num_devices
    return np.reshape(_calls(program, stage, static), (-1, 2)).sum(axis=0) * sequences


def num_attention_layers(program: Program, stage: Stage) -> int:
    """Calls of attention in one forward pass."""
    return len(_calls(program, stage, next(iter(_inputs(program, stage)))))


def _inputs(program: Program, stage: Stage) -> Counter[Static]:
    """Steps of a stage by those of their inputs that are integers, such as windows."""
    return Counter(program.step.plan.static_at(step, integers=True) for step in steps_of(program, stage))


def steps_of(program: Program, stage: Stage) -> range:
    """Steps of a stage of the program's recipe."""
    return program.recipe.steps_of(next(i for i, one in enumerate(program.recipe.stages) if one is stage))


def mosaic_calls(program: Program, stage: Stage, device: Device) -> set[str]:
    """Return the operations, "head" and "mlp", for which a device gets kernels in Mosaic GPU."""
    static = next(iter(_inputs(program, stage)))
    found = _traced(program, stage, static, device.compute_capability).choices
    return {
        call.split()[0] for call, one in found.items() if one.name == "mosaic" or "mosaic's" in one.reason
    }


def _calls(program: Program, stage: Stage, static: Static) -> list[Attention]:
    """Return the attention of each layer, for one sequence."""
    return [
        visited_pairs(stage.seq_len, blocks, block_tokens) * (2 * heads_width)
        for blocks, block_tokens, heads_width in _traced(program, stage, static, (0, 0)).calls
    ]


def _traced(program: Program, stage: Stage, static: Static, capability: tuple[int, int]) -> "_Noting":
    """Return what the loss of one sequence asks of its kernels, and their choices."""
    noting = _Noting("gpu", "{}.{}".format(*capability))
    recipe, table, plan = program.recipe, program.layout.table, program.step.plan
    params = {name: jax.ShapeDtypeStruct(spec.shape, recipe.compute_dtype) for name, spec in table.items()}
    ids_BT = jax.ShapeDtypeStruct((1, stage.seq_len), jnp.int32)
    carry = jax.tree.map(lambda x: x[None], recipe.carry(recipe.config))
    inputs = plan.at(steps_of(program, stage)[0], plan.schedule, static)
    rest = inputs, recipe.config, noting, recipe.forward
    index_B = jnp.zeros(1, jnp.int32)

    def loss(params: Params, ids_BT: jax.Array) -> Any:
        return recipe.loss(recipe.read(params, ids_BT), Batch(ids_BT, ids_BT, carry, index_B), *rest)

    jax.eval_shape(loss, params, ids_BT)
    return noting


@dataclass(frozen=True)
class _Noting(Kernels):
    """Records calls instead of computing attention: window in blocks, block in tokens, width of all heads."""

    calls: list[tuple[int, int, int]] = field(default_factory=list)

    def attention(
        self, q_BTHK: jax.Array, _k: jax.Array, v_BTHK: jax.Array, _: jax.Array, /, **more: Any
    ) -> jax.Array:
        """Return `v_BTHK`, which has the shape of the result."""
        blocks, width = more["window"].blocks, math.prod(q_BTHK.shape[2:])
        assert isinstance(blocks, int)
        self.calls.append((blocks, more["block_tokens"], width))
        return v_BTHK


@cache
def visited_pairs(num_tokens: int, window_blocks: int, block_tokens: int) -> Attention:
    """Count pairs of query and key in the tiles that attention visits, times the products for each pair.

    Two products forward. Seven backward, where scores and their gradients are computed by queries and again by keys.
    """
    lengths = document_lengths(num_tokens, seed=0)
    doc_BT = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths))[None]
    first_BT = sight(doc_BT, window_blocks, block_tokens)

    def visited(tiles: attention_triton.Tiles) -> tuple[int, int]:
        """Count by queries, and by keys."""
        first_N, end_M = (np.asarray(x)[0] for x in attention_triton.bounds(first_BT, tiles))
        end_N = -(-np.minimum(np.arange(1, len(first_N) + 1) * tiles.queries, num_tokens) // tiles.keys)
        first_M = np.arange(len(end_M)) * tiles.keys // tiles.queries
        size = tiles.queries * tiles.keys
        return size * int(np.sum(end_N - first_N)), size * int(np.sum(end_M - first_M))

    (forward, _), (by_queries, _), (_, by_keys) = map(visited, attention_triton.HOPPER)
    return np.array([2.0 * forward, 3 * by_queries + 4 * by_keys])


def seconds(work: Work, device: Device) -> tuple[float, Bound]:
    """Return the time of a kernel, or of several with the same bound, and that bound."""
    lanes_rate = device.num_cores * _LANES * device.clock_ghz * 1e9
    bounds: dict[Bound, float] = {
        "tensor cores": work.flops / (REACHES[work.unit] * flops_rate(device, work.unit)),
        "instructions": work.instructions / (REACHES["instructions"] * lanes_rate),
        "memory": work.num_bytes / (REACHES["memory"] * device.memory_rate),
    }
    bound = max(bounds, key=bounds.__getitem__)
    start_s = START_S * work.starts
    # Each program of attention loads its own tiles before it multiplies them.
    took_s = sum(bounds.values()) if work.kind == "attention" else bounds[bound]
    return start_s + took_s, bound if took_s > start_s else "starts"


def flops_rate(device: Device, unit: Unit) -> float:
    """Return the vendor's rate: float32 runs as TF32, at half the rate of bf16; 8 bits as bf16 without FP8 units."""
    if unit in ("fp8", "mosaic fp8"):
        return device.fp8_flops or device.bf16_flops
    return device.bf16_flops / 2 if unit == "f32" else device.bf16_flops


def floor_s(line: Line, device: Device) -> float:
    """Return the time of the FLOPs of a line at the vendor's rate."""
    units: dict[str, Unit] = {kind: unit for unit, kind in GEMMS.items()}
    return line.flops / flops_rate(device, units.get(line.kind, "bf16"))


def table(works: Sequence[Work], device: Device) -> tuple[Line, ...]:
    """Sum kernels by kind."""
    by_kind = ([work for work in works if work.kind == kind] for kind in KINDS)
    return tuple(_line(same, device) for same in by_kind if same)


def _line(works: list[Work], device: Device) -> Line:
    """Sum kernels of one kind."""
    by_bound: dict[Bound, float] = {}
    for work in works:
        took_s, bound = seconds(work, device)
        by_bound[bound] = by_bound.get(bound, 0.0) + took_s
    amounts = zip(*((one.flops, one.instructions, one.num_bytes, one.starts) for one in works), strict=True)
    longest = max(by_bound, key=by_bound.__getitem__)
    kind = works[0].kind
    return Line(kind, sum(by_bound.values()), longest, *map(sum, amounts), error=errors(device)[kind])


def mean(each: Sequence[tuple[float, Sequence[Line]]]) -> tuple[Line, ...]:
    """Return the mean of several steps, each with its share, by kind of kernel."""
    found = []
    for kind in dict.fromkeys(line.kind for _, lines in each for line in lines):
        same = [(share, line) for share, lines in each for line in lines if line.kind == kind]
        sums = ("seconds", "flops", "instructions", "num_bytes", "starts")
        means = {name: sum(share * getattr(line, name) for share, line in same) for name in sums}
        found.append(msgspec.structs.replace(same[0][1], **means))
    return tuple(found)


def priced(steps: Sequence[hlo.Executed], attention: Attention) -> Iterator[tuple[hlo.Executed, Work | None]]:
    """Yield every instruction of the schedule, with the work of one execution, or None if it starts no kernel.

    Attention is divided evenly over its kernels, which are opaque to XLA.
    """
    calls: Counter[bool] = Counter()
    for step in steps:
        if _is_opaque(step.instruction, "attention"):
            calls["transpose(" in step.instruction.source] += step.times
    flops = [flops / max(1, calls[bool(way)]) for way, flops in enumerate(attention.tolist())]
    for step in steps:
        yield step, _work(step, flops)


def _work(step: hlo.Executed, attention_flops: Sequence[float]) -> Work | None:
    one, num_bytes = step.instruction, step.traffic_bytes
    if not num_bytes or one.kind in hlo.COLLECTIVES:
        return None
    if _is_opaque(one, "attention"):
        return Work(
            "attention", attention_flops["transpose(" in one.source], "attention", num_bytes=num_bytes
        )
    if _is_opaque(one, "loss_head"):
        logits = max(array.size for name in one.operands for array in step.around[name].arrays)
        return Work("head passes", instructions=HEAD_SLOTS * logits, num_bytes=num_bytes)
    products = step.products
    unit: Unit = max(products, key=lambda p: p.flops).unit if products else "bf16"
    kind = _kind(one, unit if products else None)
    instructions = sum(_INSTRUCTIONS.get(opcode, 1) * n for opcode, n in step.computed.items())
    return Work(
        kind=kind,
        flops=sum(product.flops for product in products),
        unit="stacks" if (kind, unit) == ("Muon", "bf16") else unit,
        instructions=0 if products else instructions + _ACCESS * step.accessed,
        num_bytes=num_bytes,
    )


def _kind(one: hlo.Instruction, unit: Unit | None) -> Kind:
    """Classify by the scopes of `kernels.choose` and the optimiser, else by arithmetic unit."""
    if "muon" in one.source:
        return "Muon"
    if "attention" in one.source:
        return "attention"
    if unit is not None:
        return GEMMS[unit]
    return "head passes" if "loss_head" in one.source else "elementwise"


def _is_opaque(one: hlo.Instruction, scope: str) -> bool:
    """Whether this is a kernel of a scope not written by XLA, which shows its operands but not its arithmetic."""
    return one.kind == "custom-call" and not one.target.startswith("__cublas") and scope in one.source


def gb(num_bytes: float) -> str:
    """Format bytes as GB, 10^9 bytes."""
    return f"{num_bytes / 1e9:.2f} GB"


def ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{seconds * 1e3:,.2f} ms"
