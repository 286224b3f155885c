"""Compare the cost model with measurements: with kernels that PyTorch ran on shapes like ours, or with a record.

Of a trace (`torch_trace`) the model has terms for

    product         FLOPs from the shapes, against the rate of its arithmetic unit
    cast, sum       bytes of its operands, against the rate of memory; only arrays that no cache holds
    collective      bytes, against the rate of the links; its shortest call, as others wait for late devices

Fused passes, attention and loss heads are other programs than ours, with unknown traffic: their time is shown, and
compared with nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from speedrun import recipes
from speedrun.base import accelerators
from speedrun.base.accelerators import Device
from speedrun.base.errors import UsageError, translate_read_errors
from speedrun.plan import cost, scaling, torch_trace
from speedrun.plan.deviceless import Collective, missing_wheels
from speedrun.plan.estimate import plan
from speedrun.plan.shares import GEMMS, KINDS, REACHES, START_S, Kind, Rate
from speedrun.plan.torch_trace import Operation
from speedrun.record.reader import load_result

#: The rate that limits kernels of a kind.
_RATES: dict[Kind, Rate] = {"communication": "links", "elementwise": "memory", "Muon": "stacks"}
_RATES |= {kind: unit for unit, kind in GEMMS.items()}


class Row(msgspec.Struct, frozen=True):
    """All calls of one operation on one shape."""

    kind: Kind
    name: str
    shape: str
    calls: int
    measured_s: float  #: of one call: the median, or the shortest of a collective
    predicted_s: float  #: of one call, without the gap before it

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


class Term(msgspec.Struct, frozen=True):
    """All rows of one kind."""

    kind: Kind
    measured_s: float
    predicted_s: float
    error: float  #: mean of |measured / predicted - 1| over shapes, weighted by time
    reach: float  #: share of the vendor's rate at which the prediction of the whole kind would be right


class Check(msgspec.Struct, frozen=True):
    """A comparison of the model with traces of one device."""

    device: str
    num_traces: int
    terms: tuple[Term, ...]
    rows: tuple[Row, ...]  #: by kind, longest first
    other_s: dict[str, float]  #: time of kernels that the model has no term for, by what launched them
    gap_s: float  #: the median between two kernels of a stream

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        head = f"{'kind':<14} {'operation':<18} {'shape':<42} {'calls':>5} {'measured':>10} {'predicted':>10} ratio"
        return [
            f"check  {self.num_traces} traces of {self.device} | times of one call in us",
            head,
            *(
                f"{row.kind:<14} {row.name:<18} {row.shape:<42} {row.calls:>5} {row.measured_s * 1e6:>10.1f} "
                f"{row.predicted_s * 1e6:>10.1f} {row.ratio:>5.2f}"
                for row in self.rows
            ),
            f"{'kind':<14} {'measured':>10} {'predicted':>10} ratio  error of shapes  the share that would fit",
            *(
                f"{term.kind:<14} {cost.ms(term.measured_s):>10} {cost.ms(term.predicted_s):>10} "
                f"{term.measured_s / term.predicted_s:>5.2f}  {term.error:>15.1%}  {term.reach:.3f}"
                for term in self.terms
            ),
            f"gaps   {self.gap_s * 1e6:.2f} us between two kernels of a stream; the model has "
            f"{START_S * 1e6:.2f}",
            "other  no term: "
            + ", ".join(f"{name} {cost.ms(seconds)}" for name, seconds in self.other_s.items()),
        ]


def check(paths: Sequence[Path]) -> Check:
    """Compare the model with traces.

    Raises:
        DataError: if a file is no trace with shapes.
        UsageError: if the traces are of different devices, or of one that has no rates.
    """
    calls: defaultdict[Operation, list[float]] = defaultdict(list)
    other_s: defaultdict[str, float] = defaultdict(float)
    gaps: list[float] = []
    names = set()
    for path in paths:
        trace = torch_trace.read(path)
        names.add(trace.device_properties[0].name)
        device = _device(names)
        with translate_read_errors(path, torch_trace.ADVICE, TypeError, OverflowError):
            for operation, launcher, seconds in torch_trace.operations(trace, device):
                if operation is None:
                    other_s[launcher] += seconds
                else:
                    calls[operation].append(seconds)
            gaps += torch_trace.gaps(trace)
    device = _device(names)
    rows = [_row(operation, times, device) for operation, times in calls.items()]
    rows.sort(key=lambda row: (KINDS.index(row.kind), -row.calls * row.measured_s))
    terms = tuple(_term(kind, same) for kind in KINDS if (same := [row for row in rows if row.kind == kind]))
    longest = dict(sorted(other_s.items(), key=lambda item: -item[1])[:5])
    return Check(device.name, len(paths), terms, tuple(rows), longest, median(gaps or [0.0]))


def _device(names: set[str]) -> Device:
    """Return the device that all were measured on."""
    if len(names) > 1:
        raise UsageError(f"measured on {' and '.join(sorted(names))}: give traces of one device")
    (name,) = names
    if (device := accelerators.named(name)) is None:
        known = ", ".join(one.name for one in accelerators.DEVICES.values())
        raise UsageError(f"measured on {name}, for which there are no rates; need one of {known}")
    return device


def _row(operation: Operation, times: list[float], device: Device) -> Row:
    if isinstance(operation.work, Collective):
        measured_s = min(times)
        predicted_s = scaling.seconds(operation.work, len(operation.work.groups[0]), 1, device)
    else:
        measured_s = median(times)
        predicted_s = cost.seconds(operation.work, device)[0] - START_S
    return Row(operation.kind, operation.name, operation.shape, len(times), measured_s, predicted_s)


def _term(kind: Kind, rows: list[Row]) -> Term:
    measured_s = sum(row.calls * row.measured_s for row in rows)
    predicted_s = sum(row.calls * row.predicted_s for row in rows)
    error = sum(row.calls * row.measured_s * abs(row.ratio - 1) for row in rows) / measured_s
    return Term(kind, measured_s, predicted_s, error, REACHES[_RATES[kind]] * predicted_s / measured_s)


# --- records


class StageCheck(msgspec.Struct, frozen=True):
    """The steps of one stage."""

    num_steps: int
    measured_s: float  #: the median of a step, over all runs
    predicted_s: float
    error: float  #: of the prediction, relative

    def __str__(self) -> str:
        ratio = self.measured_s / self.predicted_s
        return (
            f"stage  {self.num_steps:,} steps | measured {cost.ms(self.measured_s)} | "
            f"predicted {cost.ms(self.predicted_s)} +-{self.error:.0%} | ratio {ratio:.2f}"
        )


def check_record(path: Path) -> list[StageCheck]:
    """Compare the steps of a record with the plan of its recipe on its devices.

    Raises:
        UsageError: if it ran on devices without rates, or is no record with a finished run.
    """
    record = load_result(path)
    num_devices, name = record.lead.hardware
    _device({name})
    kind = next(kind for kind, device in accelerators.DEVICES.items() if device.name == name)
    start = record.lead.start
    recipe = recipes.load(start.recipe).override(start.overrides)
    if (recipe.revision, recipe.num_steps) != (start.recipe_revision, start.num_steps):
        raise UsageError(f"{path}: {start.recipe} was another then; check out the commit of the record")
    basis = "arithmetic" if missing_wheels() else "compiled program"
    planned = plan(recipe, kind, num_devices, start.config.get("microbatches", 8), basis)
    found = []
    for index, expected in enumerate(planned.stages):
        steps = recipe.steps_of(index)
        measured_s = median(s for run in record.finished for s in run.step_s[steps.start : steps.stop])
        found.append(StageCheck(len(steps), measured_s, expected.step_s, expected.error))
    return found
