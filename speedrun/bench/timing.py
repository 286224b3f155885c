"""Forms of one operation, timed in turns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from speedrun.ground.clock import Stopwatch
from speedrun.science.kernels.choose import Choice, Form

_TRIALS = 7


class Timing(NamedTuple):
    """One form of an operation."""

    name: str
    median_ms: float
    spread_ms: float  #: from the first to the ninth decile
    ratio: float  #: of medians, to the first form of its table


class FormTimings(NamedTuple):
    """Every form of an operation that runs here."""

    timings: list[Timing]
    left_out: dict[str, list[str]]  #: why the others do not run
    auto: str  #: the form "auto" takes
    reason: str


def compare_forms(
    forms: dict[str, Form],
    choose: Callable[[str, Any], Choice],
    call: Any,
    program: Callable[[Callable[..., Any]], Callable[..., Any]],
    *args: Any,
) -> FormTimings:
    """Times `program(form)` on `args` for each form that can run `call`, as its chooser binds it."""
    left_out = {name: reasons for name, form in forms.items() if (reasons := form.against(call))}
    programs = {name: program(choose(name, call).function) for name in forms if name not in left_out}
    auto = choose("auto", call)
    return FormTimings(compare(programs, *args), left_out, auto.name, auto.reason)


def compare(forms: dict[str, Callable[..., Any]], *args: Any) -> list[Timing]:
    """Some calls of each compiled form, taken in turns so that a slow moment hits all of them."""
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
    """Median, and the way from the first to the ninth decile."""
    low, median, high = np.quantile(times, (0.1, 0.5, 0.9))
    return float(median), float(high - low)
