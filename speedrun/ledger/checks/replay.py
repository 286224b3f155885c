"""V601 to V605: what an examiner saw of the run's final state, against what the run said.

The others read; these need the record's source to be executed (`speedrun.rerun`).
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from speedrun import runlog
from speedrun.ledger.checks.table import Check, Skip
from speedrun.ledger.findings import Findings
from speedrun.ledger.record import Record
from speedrun.ledger.run import Run

#: Nats per token, between two ways to add up the same products.
_SCORER = 2e-4
_MASS = 1e-3
_OUTPUT = 1e-4
_COMPANY = 1e-5
#: Nats. On a CPU the losses are equal to the last bit; a GPU sums the gradients of tables in no fixed order.
_REPLAYED = 1e-2

Find = Callable[[Run, Findings], Iterator[str]]


@dataclass(frozen=True)
class ReplayCheck:
    """A check that takes an examination."""

    check: Check
    find: Find

    def of(self, run: Run, findings: Findings) -> Check:
        """The check, with the findings at hand."""
        found = self.find

        def find(_record: Record) -> Iterator[str]:
            return (f"{run.folder}: {problem}" for problem in found(run, findings))

        return dataclasses.replace(self.check, find=find)


def _unasked(_record: Record) -> Iterator[str]:
    raise Skip("asked with --replay only")


def check_findings(id: str, title: str, *, why: str, hint: str) -> Callable[[Find], ReplayCheck]:
    """Makes a check of a function from a run and its findings to problems."""
    return lambda find: ReplayCheck(Check(id, title, why, hint, ("runs",), "error", _unasked), find)


@check_findings(
    "V601",
    "the final state has the stated loss",
    why="whoever writes the log can write any loss; the weights cannot lie about theirs",
    hint="bring the state that the run ended with: its hash stands in run.json",
)
def loss(run: Run, findings: Findings) -> Iterator[str]:
    """By a scorer that shares no line with the record's."""
    if findings.final_hash != run.file.final_hash:
        yield f"the state that was scored is {findings.final_hash}, the run ended with {run.file.final_hash}"
    if not abs(findings.val_loss - run.val_loss) <= _SCORER:
        yield f"its final state scores {findings.val_loss:.5f}, the run says {run.val_loss:.5f}"


@check_findings(
    "V602",
    "probabilities sum to one",
    why="a loss of something that is no distribution has no meaning, and can be as low as one likes",
    hint="let the head end in a softmax over the whole vocabulary",
)
def normalised(_run: Run, findings: Findings) -> Iterator[str]:
    """Every id takes a turn as the target."""
    if not findings.masses:
        raise Skip("the vocabulary is too large to score every id")
    for mass in findings.masses:
        if not abs(mass - 1) <= _MASS:
            yield f"the probabilities of all ids sum to {mass:.5f}"


@check_findings(
    "V603",
    "no output knows a later token",
    why="a model that sees the answer predicts it",
    hint="look for attention without its mask, a shift by one, a mean over the sequence",
)
def causal(_run: Run, findings: Findings) -> Iterator[str]:
    """Tokens are changed one at a time."""
    if not findings.leak <= _OUTPUT:
        yield f"an output changed by {findings.leak:.3g} when a later token did"


@check_findings(
    "V604",
    "a sequence is scored by itself",
    why="what one sequence learns from its neighbours in the batch, it would not know alone",
    hint="look for statistics over the batch, and for state that is kept between sequences",
)
def by_itself(_run: Run, findings: Findings) -> Iterator[str]:
    """Sequences change places."""
    if not findings.company <= _COMPANY:
        yield f"a sequence's loss changed by {findings.company:.3g} a token in other company"


@check_findings(
    "V605",
    "training goes on from its checkpoints as the log says",
    why="checkpoints chosen by the hash of the finished log cannot be prepared; a log that was made up fails here",
    hint="bring the checkpoints of this very run",
)
def goes_on(run: Run, findings: Findings) -> Iterator[str]:
    """A few losses after each of them; and each is the one that the log names, if it names some."""
    if not findings.restarts:
        raise Skip("there is no checkpoint but the last")
    said = {step.step: step.loss for step in run.steps}
    kept = {event.step: event.state_hash for event in run.of(runlog.Checkpoint)}
    for restart in findings.restarts:
        if (named := kept.get(restart.step, restart.state_hash)) != restart.state_hash:
            yield f"checkpoint {restart.step} is {restart.state_hash}, the log says {named}"
        for step, replayed in enumerate(restart.losses, restart.step):
            if not abs(replayed - said[step]) <= _REPLAYED:
                differ = f"step {step} has loss {replayed:.5f}, the log says {said[step]:.5f}"
                yield f"from checkpoint {restart.step}, {differ}"
                break


REPLAY_CHECKS = (loss, normalised, causal, by_itself, goes_on)
