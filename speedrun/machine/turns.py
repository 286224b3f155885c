"""Time several forms of one operation in turns."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import msgspec
import numpy as np

from speedrun.base.clock import Stopwatch
from speedrun.science.kernels.choose import Choice, Form

_TRIALS = 7


class Timing(msgspec.Struct, frozen=True):
    """One form of an operation."""

    name: str
    median_ms: float
    spread_ms: float  #: from the first to the ninth decile
    ratio: float  #: of medians, to the first form

    def __str__(self) -> str:
        return f"{self.name:<16} {self.median_ms:9.2f} ms +- {self.spread_ms:6.2f}  {self.ratio:5.2f} x"


class FormTimings(msgspec.Struct, frozen=True):
    """Every form of an operation that runs here."""

    timings: list[Timing]
    left_out: dict[str, list[str]]  #: the other forms, and why they do not run
    auto: str  #: the form that "auto" chooses
    reason: str

    def __str__(self) -> str:
        others = [f"{name:<16} not here: {'; '.join(reasons)}" for name, reasons in self.left_out.items()]
        return "\n".join([*map(str, self.timings), *others, f"{'auto':<16} {self.auto}: {self.reason}"])


def compare_forms(
    forms: Mapping[str, Form],
    choose: Callable[[str, Any], Choice],
    call: Any,
    program: Callable[[Callable[..., Any]], Callable[..., Any]],
    *args: Any,
) -> FormTimings:
    """Time `program(form)` on `args` for each form that can run `call`."""
    left_out = {name: reasons for name, form in forms.items() if (reasons := form.refusals(call))}
    programs = {name: program(choose(name, call).function) for name in forms if name not in left_out}
    auto = choose("auto", call)
    return FormTimings(compare(programs, *args), left_out, auto.name, auto.reason)


def compare(forms: dict[str, Callable[..., Any]], *args: Any) -> list[Timing]:
    """Time calls of each compiled form, in turns so that a slow moment affects all of them."""
    programs = {name: jax.jit(form).lower(*args).compile() for name, form in forms.items()}
    for program in programs.values():
        jax.block_until_ready(program(*args))
    ms: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(_TRIALS):
        for name, program in programs.items():
            watch = Stopwatch()
            jax.block_until_ready(program(*args))
            ms[name].append(watch.seconds * 1e3)
    first = float(np.median(next(iter(ms.values()))))
    return [Timing(name, *middle(times), float(np.median(times)) / first) for name, times in ms.items()]


def middle(times: list[float]) -> tuple[float, float]:
    """Return the median, and the distance from the first to the ninth decile."""
    low, median, high = np.quantile(times, (0.1, 0.5, 0.9))
    return float(median), float(high - low)
