"""V601 to V610: compare runs with the findings of `record.examine.examiner`, which runs their programs.

On one machine a program always gives the same bits. Two honest machines round differently, and training amplifies the
difference: their losses may differ by `tolerance`, which grows with the steps since both states were equal.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from speedrun.base import runlog
from speedrun.record.checks.table import Check, Skip, at_most, check, problems_of, same
from speedrun.record.checks.v5_source import leaves
from speedrun.record.examination import Findings, Replayed
from speedrun.record.logged_run import Run, loss_of
from speedrun.record.reader import Record

#: Nats per token between the mean losses that run and examiner compute for one state, by compute dtype. Measured in
#: float32 on one CPU: 2.4e-6.
_SCORER = {"float32": 3e-5, "bfloat16": 2e-4}
#: Nats per token between the losses of one sequence in two forms of one program, by compute dtype; ten times what was
#: measured (docs/referee.md).
_FORMS = {"float32": 2e-4, "bfloat16": 2e-3}
#: Nats by which losses of two machines may differ one step after equal states, by compute dtype; ten times what was
#: measured (docs/referee.md). Early steps are sensitive, since some weights and all second moments start at zero.
_FIRST = {"float32": 1e-5, "bfloat16": 1e-3}
_EARLY = {"float32": 3e-4, "bfloat16": 1e-3}
_SETTLED = 40  #: steps
_GROWTH = 1.5
#: Assumed sd as a share of the loss: runs of one seed on two machines differ like two seeds, on smoke 0.0036 each.
_SEEDS, _DRIFT_SDS = 0.005, 4.0
MOST_CONSTANT_BYTES = 5_000  #: 0.0026 nats on the main track, little more than its sd
_NOISE = 4.0  #: standard errors
_LOW_NOISE = 8.0  #: likewise, of losses cut at a quartile, which are skewed
_ALIVE = 1.0  #: nats that shuffled targets must cost


def tolerance(dtype: str, start: int, num_steps: int) -> float:
    """Return the nats by which a loss may differ on another machine, `num_steps` after equal states before `start`."""
    return (_FIRST if start >= _SETTLED else _EARLY)[dtype] * (1 + num_steps**_GROWTH)


def check_findings(rule: str, **fields: Any) -> Callable[[Callable[[Run, Findings], Iterator[str]]], Check]:
    """Decorate a function that yields the problems of a run, given its findings."""

    def find_all(find: Callable[[Run, Findings], Iterator[str]], record: Record) -> Iterator[str]:
        if not record.findings:
            raise Skip("needs --replay, or --relower")
        examined = [run for run in record.runs if run.folder in record.findings]
        yield from problems_of([(run, record.findings[run.folder]) for run in examined], find)

    return lambda find: check(rule, **fields)(partial(find_all, find))


@check_findings(
    "V601 the final state has the stated loss",
    why="a log can claim any loss, but the loss of weights can be measured",
    hint="pass the run's last checkpoints; the last line of its log holds the hash of its final state",
)
def _loss(run: Run, findings: Findings) -> Iterator[str]:
    """The comparison is tight if the state is the run's own, or was reproduced bit by bit.

    On another platform, only some sequences and their mean are compared.
    """
    scores = f"its final state scores {findings.val_loss:.5f}, the run says {run.val_loss:.5f}"
    ended_alike, differ = findings.final_hash == run.final_hash, abs(findings.val_loss - run.val_loss)
    yield same("sha256 of the scored ids", findings.val_sha256, run.data.val_sha256)
    if findings.own:
        yield same("the state that was scored", findings.final_hash, run.final_hash)
    exact = findings.own or ended_alike
    told = [val.sequences for val in (run.vals[-1], run.held_out) if val]
    logged, most = sum(told, ()), _FORMS[findings.dtype]
    if logged or run.held_out:
        yield same("numbers of its sequences", [*map(len, told)], [*findings.num_sequences[: len(told)]])
    apart = [nats - logged[at] if at < len(logged) else math.inf for at, nats in findings.sample]
    first = sum(at < findings.num_sequences[0] for at, _ in findings.sample)
    worst, held = max(apart, key=abs, default=0.0), fmean(apart[first:] or [0.0])
    if logged and exact and not all(abs(nats) <= most for nats in apart):
        yield f"one of its sequences differs by {worst:+.5f} nats from the log; {most:.5f} is allowed"
    if findings.foreign:
        for part in filter(None, (apart[:first], apart[first:])):
            if not abs(fmean(part)) <= (allowed := most / len(part) ** 0.5):
                yield f"their mean differs by {fmean(part):+.5f} nats from the log; {allowed:.5f} is allowed"
        return
    allowed, how = (_SCORER[findings.dtype], "") if exact else (_drift(run), "trained again, ")
    if not differ <= allowed:
        yield f"{how}{scores}; {allowed:.5f} is allowed"
    if not abs(held) <= allowed:
        yield f"{how}held-out text differs by {held:+.5f} nats from the log; {allowed:.5f} is allowed"
    if not exact and differ <= allowed and abs(held) <= allowed:
        raise Skip(f"{how}{scores}, drift is {allowed:.5f}; pass --checkpoints to score its own state")


def _drift(run: Run) -> float:
    return _DRIFT_SDS * _SEEDS * abs(run.val_loss)


@check_findings(
    "V602 the loss is of a distribution over the whole vocabulary",
    why="without a normalised distribution a loss has no meaning, and can be arbitrarily low",
    hint="give the logits a column for every id, and let each row depend only on its own hidden state",
)
def _normalised(_run: Run, findings: Findings) -> Iterator[str]:
    yield at_most("ids, by the columns of its logits", findings.num_ids, findings.columns)
    yield same("change of a log-probability with the rows next to it", findings.rows, 0)


@check_findings(
    "V603 no output depends on a later token",
    why="a model that sees the target predicts it",
    hint="look for attention without a mask, a shift by one, or a mean over the sequence",
)
def _causal(_run: Run, findings: Findings) -> Iterator[str]:
    where = f"change of a log-probability at position {findings.leak_at} with later tokens"
    yield same(where, findings.leak, 0)


@check_findings(
    "V604 a sequence is scored independently",
    why="a sequence must not profit from its neighbours in the batch",
    hint="look for statistics over the batch, and for state that is kept between sequences",
)
def _separate(_run: Run, findings: Findings) -> Iterator[str]:
    yield same("change of a log-probability with other neighbours", findings.neighbours, 0)


@check_findings(
    "V605 training reproduces the log",
    why="a nonce draws the repeated stretches, so nobody can prepare an invented log for them",
    hint="pass checkpoints of this run, or none",
)
def _repeated(run: Run, findings: Findings) -> Iterator[str]:
    if findings.foreign:
        raise Skip(f"it ran on a {run.preflight.platform}, which is needed to repeat its training")
    stated = {step.step: step.loss for step in run.steps}
    scored = {val.step: loss_of(val) for val in run.vals}
    kept = {event.step: event.state_hash for event in run.of(runlog.Checkpoint)}
    ends = {**kept, run.start.num_steps: run.final_hash}
    exact = any(ends.get(one.stop) == one.stop_hash for one in findings.stretches)
    for one in findings.stretches:
        where = f"from checkpoint {one.start}" if one.from_checkpoint else "from the seed"
        begun = {0: run.of(runlog.WarmupStart)[0].state_hash} if exact else {}
        named = (kept if one.from_checkpoint else begun).get(one.start, one.state_hash)
        yield same(f"the state before step {one.start}", one.state_hash, named)
        problems = () if run.of(runlog.Islands) else _misread(run, one)  # V108 has their tokens
        yield from (problem and f"{where}: {problem}" for problem in problems)
        yield same(f"{where}: losses of steps", len(one.losses), one.stop - one.start)
        made = [("step", at, loss, stated, 0.0) for at, loss in enumerate(one.losses, one.start)]
        made += [("validation", at, loss, scored, _SCORER[findings.dtype]) for at, loss in one.vals]
        for what, at, loss, log, most in sorted(made, key=lambda each: each[1]):
            allowed = most + (0.0 if exact else tolerance(findings.dtype, one.start, at - one.start))
            if at in log and not abs(loss - log[at]) <= allowed:
                why = ", as a state was reached in the same bits" if exact else ""
                found = f"{where}, {what} {at} has loss {loss:.7g}, the log says {log[at]:.7g}"
                yield f"{found}; {allowed:.5f} is allowed{why}"
                break


def _misread(run: Run, one: Replayed) -> Iterator[str]:
    """Yield what a repeated stretch read otherwise than the log says."""
    read = {run.origin.step: run.origin.cursor} | {step.step + 1: step.cursor for step in run.steps}
    if one.start == run.origin.step:
        yield same("the first batch", one.first_batch_sha256, run.end.first_batch_sha256)
    if (one.start, one.stop) == (run.origin.step, run.start.num_steps):
        logged = [replace(shard, sha256="") for shard in run.data.shards]
        yield from (same("what it read", *both) for both in zip_longest(one.ranges, logged))
    for at, cursor in zip((one.start, one.stop), one.cursors, strict=True):
        yield same(f"the next token before step {at}", cursor, read.get(at, cursor))


@check_findings(
    "V606 the run's own training led to the scored state",
    severity="warning",
    why="a log can be invented if its training is not repeated, or within the drift between machines",
    hint="pass the run's checkpoints (--checkpoints), or replay on the kind of machine that made it",
)
def _its_own(run: Run, findings: Findings) -> Iterator[str]:
    """Warns if V601 or V605 is skipped."""
    if findings.foreign:
        yield f"it ran on a {run.preflight.platform}, so its training was not repeated here"
    exact = findings.own or findings.final_hash == run.final_hash
    if not exact and abs(findings.val_loss - run.val_loss) <= _drift(run):
        yield f"trained again, its final state is {findings.final_hash}, the log says {run.final_hash}"


def memory_nats(num_bytes: int, num_tokens: int) -> float:
    """Return the most nats by which text in so many bytes lowers the mean loss of tokens: b ln 2 / N (`constants`)."""
    return 8 * num_bytes * math.log(2) / num_tokens


def _gap(findings: Findings) -> float:
    """Return how many nats more other text loses, less the noise: all of it, or its low losses."""
    if findings.other_loss is None:
        return -math.inf
    whole = findings.other_loss - findings.val_loss - _NOISE * findings.other_error
    return max(whole, findings.low_gap - _LOW_NOISE * findings.low_error)


def _told(findings: Findings) -> str:
    noise = _NOISE * findings.other_error
    both = f"other text of its kind loses {findings.other_loss:.4f}, the scored text {findings.val_loss:.4f}"
    low = f"losses cut at its lower quartile differ by {findings.low_gap:.4f}"
    return f"{both}; noise is {noise:.4f}; {low}, noise is {_LOW_NOISE * findings.low_error:.4f}"


@check_findings(
    "V607 the scored text is not in the programs",
    why="a program can recognise a scored sequence by its beginning and continue it from memory",
    hint="compute tables in the program; other text must be predicted as well, unless the constants are too few",
)
def _memory(run: Run, findings: Findings) -> Iterator[str]:
    """A gap that the constants cannot hold is left to V608: the shards may differ."""
    held = f"its programs hold {findings.constant_bytes:,} bytes of constants"
    if findings.constant_bytes > MOST_CONSTANT_BYTES:
        yield f"{held}, need {MOST_CONSTANT_BYTES:,} or less"
    if 0 < _gap(findings) <= (most := memory_nats(findings.constant_bytes, run.vals[-1].tokens)):
        yield f"{held}, which can be worth {most:.4f} nats; {_told(findings)}"


@check_findings(
    "V608 other text has the same loss",
    severity="warning",
    why="a model that predicts only the scored text has seen it",
    hint="look for the place where the model recognises a text; the other shards may also be of another kind",
)
def _generalises(_run: Run, findings: Findings) -> Iterator[str]:
    if findings.other_loss is None:
        yield "there is no other text to score"
    if _gap(findings) > 0:
        yield _told(findings)
    if findings.shuffled_loss - findings.val_loss < _ALIVE:
        yield f"with shuffled targets it loses {findings.shuffled_loss:.4f}, with its own {findings.val_loss:.4f}"


@check_findings(
    "V609 the programs are as large as the log says",
    why="an author can write any sizes into the log, but not into the programs",
    hint="let the harness log what it runs",
)
def _sizes(run: Run, findings: Findings) -> Iterator[str]:
    (plan,) = run.of(runlog.Plan)
    least, most = findings.num_params
    if not least <= plan.num_params <= most:
        yield f"the log says {plan.num_params:,} parameters, its programs hold {least:,} to {most:,}"
    yield same("bytes of state a device", findings.state_bytes_per_device, plan.state_bytes_per_device)
    every = next((fleet.every for fleet in run.of(runlog.Islands)), 0)
    used = {
        one.version: sum(not work.refused for work in one.works) for one in run.of(runlog.Round) if one.digest
    }
    for step, tokens in zip(run.steps, findings.batch_tokens[run.origin.step :], strict=False):
        num_meshes = used.get(step.step // every, 0) if every else 1
        if step.batch_tokens != num_meshes * tokens:
            taken = f"its program takes {tokens:,}" + f", on {num_meshes} islands" * bool(every)
            yield f"step {step.step}: the log says {step.batch_tokens:,} tokens, {taken}"
            break
    claimed = leaves(run.start.config).get("recipe.compute_dtype")  # the config is untrusted
    if claimed == "bfloat16" and findings.dtype != claimed:
        yield f"the log says {claimed}, its programs hold {findings.dtype}"


#: `record.examine.replay` decides it, for `validate --relower`.
LOWERED = check_findings(
    "V610 the source makes the programs",
    why="people read, credit and fork the text, but examiners run the programs",
    hint="use the run's version of JAX, and a GPU for a GPU's; programs may depend only on the recipe and its settings",
)(lambda *_: iter(()))

REPLAY_CHECKS = (_loss, _normalised, _causal, _separate, _repeated, _its_own, _memory, _generalises, _sizes)
