"""V601 to V606: what an examiner saw of runs, their states and their programs, against what they said.

The others read; these need the record's source to be executed (`speedrun.referee.rerun`).

Two honest machines differ. Rounding differs in the last bit, and training makes that grow, so bits are never demanded:
equal bits are proof, and other losses may differ by `tolerance`, which grows with the steps since both were equal.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

from speedrun.ground import runlog
from speedrun.ledger.checks.table import Check, Skip, Texts, problems_of
from speedrun.ledger.findings import Findings
from speedrun.ledger.record import Record
from speedrun.ledger.run import Run, loss_of

#: Nats per token, between two ways to add up the same products; of tokens, the largest.
_SCORER = 2e-4
_TOKEN = 1e-3
#: Nats by which losses of two machines may differ one step after equal bits, by compute dtype; about ten times what
#: was measured (docs/referee.md). Near its seed a run is sensitive: weights and second moments begin at zero.
_FIRST = {"float32": 1e-5, "bfloat16": 1e-3}
_EARLY = {"float32": 3e-4, "bfloat16": 1e-3}
_SETTLED = 40  #: steps
_GROWTH = 1.5
#: Of a loss, the sd over seeds where nobody knows it; runs of one seed that drifted apart differ like two seeds.
_SEEDS, _DRIFT_SDS = 0.0125, 4.0


class Examined(NamedTuple):
    """A run, and what was seen of it."""

    run: Run
    findings: Findings


Find = Callable[[Run, Findings], Iterator[str]]


@dataclass(frozen=True)
class ReplayCheck:
    """A check that takes examinations."""

    check: Check
    find: Find

    def of(self, examined: Sequence[Examined]) -> Check:
        """Return the check with the findings bound."""
        return dataclasses.replace(self.check, find=lambda _record: problems_of(examined, self.find))


def tolerance(run: Run, start: int, num_steps: int) -> float:
    """Nats by which a loss of an honest run may differ on another machine.

    Args:
        run: whose compute dtype decides.
        start: the step before which the states were equal.
        num_steps: that were made since.
    """
    recipe = run.start.config.get("recipe")
    dtype = recipe.get("compute_dtype") if isinstance(recipe, dict) else None
    first = _FIRST if start >= _SETTLED else _EARLY
    return first.get(str(dtype), first["bfloat16"]) * (1 + num_steps**_GROWTH)


def _not_replayed(_record: Record) -> Iterator[str]:
    raise Skip("needs --replay")


def check_findings(id: str, title: str, **texts: Unpack[Texts]) -> Callable[[Find], ReplayCheck]:
    """Decorate a function from a run and its findings to problems."""
    return lambda find: ReplayCheck(Check(id=id, title=title, find=_not_replayed, **texts), find)


@check_findings(
    "V601",
    "the final state has the stated loss",
    why="whoever writes the log can write any loss; the weights cannot lie about theirs",
    hint="bring the checkpoints that the run ended with: the hash of its state stands in run.json",
)
def loss(run: Run, findings: Findings) -> Iterator[str]:
    """By the examiner's own scorer. Its own state is compared tightly; a state made again, if its bits are equal."""
    said = f"its final state scores {findings.val_loss:.5f}, the run says {run.val_loss:.5f}"
    same, differ = findings.final_hash == run.file.final_hash, abs(findings.val_loss - run.val_loss)
    if findings.own and not same:
        yield f"the state that was scored is {findings.final_hash}, the run ended with {run.file.final_hash}"
    if findings.own or same:
        if not differ <= _SCORER:
            yield said
        return
    drift = _drift(run)
    if not differ <= drift:
        yield f"made again, {said}; two machines may differ by {drift:.5f}"
    else:
        raise Skip(
            f"made again, it ended in another state, as on another machine: {said}, within the drift of "
            f"{drift:.5f}; pass --checkpoints to score its own state"
        )


def _drift(run: Run) -> float:
    return _DRIFT_SDS * _SEEDS * abs(run.val_loss)


@check_findings(
    "V602",
    "the loss is of a distribution over the whole vocabulary",
    why="a loss of something that is no distribution has no meaning, and can be as low as one likes",
    hint="let the logits have a column for every id, and each row depend on its own hidden state alone",
)
def normalised(run: Run, findings: Findings) -> Iterator[str]:
    """The examiner takes the log-sum-exp itself; the logits must have all columns, row by row."""
    if findings.columns < findings.num_ids:
        yield f"the logits have {findings.columns} columns, the track {findings.num_ids} ids"
    if not findings.rows <= _TOKEN:
        yield f"a log-probability changed by {findings.rows:.3g} with the rows beside it"


@check_findings(
    "V603",
    "no output knows a later token",
    why="a model that sees the answer predicts it",
    hint="look for attention without its mask, a shift by one, a mean over the sequence",
)
def causal(_run: Run, findings: Findings) -> Iterator[str]:
    """The ends of texts are changed at many places, and all outputs before them compared."""
    if not findings.leak <= _TOKEN:
        yield f"a log-probability at position {findings.leak_at} changed by {findings.leak:.3g} when later tokens did"


@check_findings(
    "V604",
    "a sequence is scored by itself",
    why="what one sequence learns from its neighbours in the batch, it would not know alone",
    hint="look for statistics over the batch, and for state that is kept between sequences",
)
def by_itself(_run: Run, findings: Findings) -> Iterator[str]:
    """Sequences change places and neighbours."""
    if not findings.company <= _TOKEN:
        yield f"a log-probability changed by {findings.company:.3g} in other company"


@check_findings(
    "V605",
    "training goes as the log says",
    why="stretches that a nonce chooses cannot be prepared; a log that was made up fails here",
    hint="bring the checkpoints of this very run, or none",
)
def goes_on(run: Run, findings: Findings) -> Iterator[str]:
    """Every loss of every stretch, and every validation in it; and each checkpoint is the one that the log names."""
    said = {step.step: step.loss for step in run.steps}
    scored = {val.step: loss_of(val) for val in run.vals}
    kept = {event.step: event.state_hash for event in run.of(runlog.Checkpoint)}
    for one in findings.stretches:
        where = f"from checkpoint {one.start}" if one.from_checkpoint else "from the seed"
        named = kept.get(one.start, one.state_hash) if one.from_checkpoint else one.state_hash
        if named != one.state_hash:
            yield f"checkpoint {one.start} is {one.state_hash}, the log says {named}"
        if len(one.losses) != one.stop - one.start:
            yield f"{where}: {len(one.losses)} losses of {one.stop - one.start} steps"
        made = [("step", at, loss, said) for at, loss in enumerate(one.losses, one.start)]
        made += [("validation", at, loss, scored) for at, loss in one.vals]
        for what, at, loss, log in sorted(made, key=lambda each: each[1]):
            most = tolerance(run, one.start, at - one.start)
            if at in log and not abs(loss - log[at]) <= most:
                yield f"{where}, {what} {at} has loss {loss:.5f}, the log says {log[at]:.5f}; {most:.5f} is allowed"
                break


@check_findings(
    "V606",
    "what was scored is the state that the run ended with",
    severity="warning",
    why="a log can be written around what another machine would give: within its drift a replay proves no loss",
    hint="bring the run's checkpoints (--checkpoints), or replay on the kind of machine that made it",
)
def its_own(run: Run, findings: Findings) -> Iterator[str]:
    """Its bits, where V601 is skipped; of the others, it tells."""
    same = findings.own or findings.final_hash == run.file.final_hash
    if not same and abs(findings.val_loss - run.val_loss) <= _drift(run):
        yield f"made again, it is {findings.final_hash}, the run ended with {run.file.final_hash}"


REPLAY_CHECKS = (loss, normalised, causal, by_itself, goes_on, its_own)
