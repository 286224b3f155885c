"""Shares of the vendor's rates that programs reach, and their errors: the frozen numbers of the cost model.

`speedrun plan --check` fits and tests them (docs/plan.md). They stay: a change must save FLOPs, instructions, bytes or
starts.
"""

from typing import Literal, get_args

from speedrun.base import accelerators
from speedrun.base.accelerators import Device

#: Kinds of kernels, in the order of the table.
Kind = Literal[
    "GEMM bf16",
    "GEMM FP8",
    "GEMM f32",
    "Mosaic bf16",
    "Mosaic FP8",
    "attention",
    "head passes",
    "elementwise",
    "Muon",
    "communication",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Arithmetic unit. "attention": products between exponentials; "stacks": many small ones; "mosaic": of `mlp_mosaic`.
Unit = Literal["bf16", "fp8", "f32", "mosaic", "mosaic fp8", "attention", "stacks"]
Rate = Unit | Literal["instructions", "memory", "links"]

#: Kinds of products that belong neither to attention nor to the optimiser.
GEMMS: dict[Unit, Kind] = {
    "bf16": "GEMM bf16",
    "fp8": "GEMM FP8",
    "f32": "GEMM f32",
    "mosaic": "Mosaic bf16",
    "mosaic fp8": "Mosaic FP8",
}
#: Share of the vendor's rate. bf16, fp8, stacks, memory and links are fitted to traces of 2025-10-31 and rounded down.
#: No trace has the others. float32 runs as TF32; Mosaic's products are taken to be slower than cuBLAS's; attention
#: reaches 356 TFLOP/s, where FlashAttention-2 in Triton is published with 469 forward.
REACHES: dict[Rate, float] = {
    "bf16": 0.72,
    "fp8": 0.70,
    "f32": 0.6,
    "mosaic": 0.6,
    "mosaic fp8": 0.5,
    "attention": 0.36,
    "stacks": 0.20,
    "instructions": 0.65,
    "memory": 0.85,
    "links": 0.72,
}
_GUESS = 0.3
#: Relative error of a kind on an H100: on traces of 2025-12-11 (2 % of casts and sums, 10 % for all passes).
ERRORS: dict[Kind, float] = {
    "GEMM bf16": 0.08,
    "GEMM FP8": 0.13,
    "GEMM f32": _GUESS,
    "Mosaic bf16": _GUESS,
    "Mosaic FP8": _GUESS,
    "attention": _GUESS,
    "head passes": _GUESS,
    "elementwise": 0.1,
    "Muon": 0.24,
    "communication": 0.06,
}
#: From the end of one kernel to the first work of the next: the median of these traces.
START_S = 1.5e-6


def errors(device: Device) -> dict[Kind, float]:
    """Return the relative error of each kind on a device; the rates of other devices than H100 are extrapolated."""
    return ERRORS if device == accelerators.load("h100") else dict.fromkeys(KINDS, _GUESS)
