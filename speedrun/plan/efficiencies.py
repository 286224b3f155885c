"""Shares of the vendor's rates that programs reach, and their errors: the frozen numbers of the cost model.

docs/plan.md says how they were fitted and tested. They stay: a change must save FLOPs, instructions, bytes or starts.
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
    "communication",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Arithmetic unit. "attention": products between exponentials; "mosaic": of `mlp_mosaic`.
Unit = Literal["bf16", "fp8", "f32", "mosaic", "mosaic fp8", "attention"]
Rate = Unit | Literal["instructions", "memory", "links"]

#: Units of the kinds that multiply.
UNITS: dict[Kind, Unit] = {
    "GEMM bf16": "bf16",
    "GEMM FP8": "fp8",
    "GEMM f32": "f32",
    "Mosaic bf16": "mosaic",
    "Mosaic FP8": "mosaic fp8",
    "attention": "attention",
}
#: By this name a Pallas kernel may state its kind, in its `metadata`.
KIND = "speedrun.plan"
#: Share of the vendor's rate (docs/plan.md): bf16, fp8, memory and links are fitted to traces of PyTorch on an
#: H100, the others to a profile of record 21 on an H200, except FP8 in Mosaic (record 89).
REACHES: dict[Rate, float] = {
    "bf16": 0.72,
    "fp8": 0.70,
    "f32": 0.4,
    "mosaic": 0.59,
    "mosaic fp8": 0.43,
    "attention": 0.42,
    "instructions": 0.50,
    "memory": 0.85,
    "links": 0.72,
}
_GUESS = 0.3
#: Relative error of a kind on an H100: on traces of 2025-12-11; of kinds that no trace has, on record 89 on an H200.
ERRORS: dict[Kind, float] = {
    "GEMM bf16": 0.08,
    "GEMM FP8": 0.13,
    "GEMM f32": _GUESS,
    "Mosaic bf16": 0.14,
    "Mosaic FP8": _GUESS,
    "attention": 0.2,
    "head passes": 0.1,
    "elementwise": 0.15,
    "communication": 0.06,
}
#: From the end of one kernel to the first work of the next: the median of these traces.
START_S = 1.5e-6


def errors(device: Device) -> dict[Kind, float]:
    """Return the relative error of each kind on a device; the rates of other devices than H100 are extrapolated."""
    return ERRORS if device.name == accelerators.load("h100").name else dict.fromkeys(KINDS, _GUESS)
