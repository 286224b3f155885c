"""V108 and V109: islands trained on disjoint tokens, and their rounds follow each other. In records of islands only."""

import math
from collections.abc import Iterator
from statistics import fmean

from speedrun.base import runlog
from speedrun.base.rounds import Work
from speedrun.record.checks.table import Skip, check
from speedrun.record.checks.v1_tokens import cuts
from speedrun.record.logged_run import rounds_of
from speedrun.record.reader import Record

_ROUNDING = 1e-6  #: nats between the loss of a step and the mean of its islands


def _rounds(record: Record) -> list[runlog.Round]:
    """Return the rounds of all runs; raise Skip if none finished."""
    if not record.finished:
        raise Skip("no run finished")
    return [one for _, one in rounds_of(record.runs)]


def _used(one: runlog.Round) -> list[Work]:
    return [work for work in one.works if not work.refused] if one.digest else []


@check(
    "V108 islands trained on disjoint tokens, in the order of the stream",
    why="islands that share tokens count them twice, and islands that choose tokens influence the loss",
    hint="let `speedrun islands run` lease tokens; an island that is lost gives its lease back",
)
def _leases(record: Record) -> Iterator[str]:
    if not (rounds := _rounds(record)):
        return
    used = sorted((work for one in rounds for work in _used(one)), key=lambda work: work.lease)
    are_cut = any(map(cuts, record.runs))  # documents
    most = max((work.num_tokens for work in used), default=0)
    lease, end = -1, (0, 0)
    for work in used:
        num_back, from_shard = work.lease - lease - 1, end[1] if work.start[0] == end[0] else 0
        follows = work.start > end if num_back else work.start == end
        if num_back and not are_cut:  # leases that came back, and that nobody trained on
            bounds = work.start[0] - end[0] <= num_back, work.start[1] - from_shard <= num_back * most
            follows = follows and all(bounds)
        if work.lease == lease or not follows:
            yield f"lease {work.lease} starts at {work.start}; lease {lease} ends at {end}"
        lease, end = work.lease, work.stop
    for work in used:
        num_read = work.stop[1] - work.start[1]
        is_whole = work.num_tokens <= num_read if are_cut else work.num_tokens == num_read
        if work.start[0] == work.stop[0] and not is_whole:
            yield f"lease {work.lease} is of {work.num_tokens:,} tokens, but holds {num_read:,}"
    skipped = used[-1].lease + 1 - len(used) if used else 0
    lost = sum(bool(one.why) for run in record.runs for one in run.of(runlog.Island))
    lost += sum(bool(work.refused) for one in rounds for work in one.works)
    if skipped > lost:
        yield f"{skipped} leases were not trained on, but only {lost} answers were lost or refused"
    for run in record.finished:
        seen = run.origin.tokens_seen
        for step in run.steps:
            seen += step.batch_tokens
            if step.tokens_seen != seen:
                yield f"{run.folder}: step {step.step}: {step.tokens_seen:,} tokens seen, the batches sum to {seen:,}"
                break
        if used and run.steps and used[-1].stop > run.steps[-1].cursor:
            yield f"{run.folder}: lease {used[-1].lease} ends at {used[-1].stop}, the data at {run.steps[-1].cursor}"
        if (trained := sum(work.num_tokens for work in used)) != seen:
            yield f"{run.folder}: {seen:,} tokens seen, its islands trained on {trained:,}"


@check(
    "V109 each round follows from the one before, by the track's rules",
    severity="error if ranked",
    why="a round that is left out or repeated, or decided by too few islands, is training that nobody counted",
    hint="keep the logs of all runs of the record; `speedrun islands run` takes the track's numbers by itself",
)
def _follows(record: Record) -> Iterator[str]:
    rounds, rules = _rounds(record), record.rules.meshes or {}
    settings = [one for run in record.runs for one in run.of(runlog.Islands)]
    if bool(settings) != bool(rules):
        yield f"{record.rules.id} is {'only' if rules else 'not'} for islands"
    if not settings:
        return
    fleet = settings[0]
    if any(one != fleet for one in settings):
        yield "runs that go on from each other have different settings"
    same = (fleet.every, fleet.quorum) == (rules.get("every"), rules.get("quorum"))
    if fleet.islands > rules.get("most", 0) or not same:
        yield f"{fleet.islands} islands, {fleet.every} steps, quorum {fleet.quorum}; the track has {rules}"
    counted = [one for one in rounds if one.digest]
    due = math.ceil(record.reference_run.start.num_steps / fleet.every)
    if [one.version for one in counted] != [*range(due)]:
        yield f"rounds {[one.version for one in counted]} counted; need 0 to {due - 1}, once each"
    joined = {one.island for run in record.runs for one in run.of(runlog.Island) if not one.why}
    steps = {step.step: step.loss for run in record.runs for step in run.steps}
    for one in counted:
        works = _used(one)
        names = {work.island for work in works}
        due = one.version, min(fleet.every, record.reference_run.start.num_steps - one.version * fleet.every)
        wrong = [work for work in works if (work.version, len(work.losses)) != due]
        enough = max(fleet.quorum, len(works)) <= len(names) <= fleet.islands
        if not enough or not names <= joined or wrong:
            yield f"round {one.version}: islands {sorted(names)} with {len(works)} answers cannot decide it"
        weights = [work.num_tokens for work in works]
        for number, losses in enumerate(zip(*(work.losses for work in works), strict=False)):
            loss = steps.get(step := one.version * fleet.every + number)
            if loss is not None and abs(loss - fmean(losses, weights)) > _ROUNDING:
                yield f"step {step} has loss {loss}, its islands a mean of {fmean(losses, weights)}"
