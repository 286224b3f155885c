"""V302 to V307, V312: the runs are those declared, are distinct, and together prove the claim."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import combinations
from math import isfinite
from pathlib import Path
from statistics import stdev
from typing import Any

from speedrun.base import runlog
from speedrun.record import git_history, layout
from speedrun.record.batch import TrackRef, allowed_crashes, batch_status, completed, looks, seeds_from
from speedrun.record.checks.table import Skip, check, same
from speedrun.record.logged_run import FormatError, Run, read_run
from speedrun.record.reader import Record
from speedrun.record.statistics import chi2_cdf

_TOO_CLOSE = 1e-4  #: probability of losses this close, under the track's noise
_MOST_DERIVED = 200  #: chosen seeds must not be among so many that follow from source and config
_FEWEST = 4  #: fewer runs or losses can be close by chance
_COMMITTED = "records"  #: holds the committed records: `records/<track>/<record>/`


@check(
    "V302 the batch proves its target",
    before="batch",
    severity="warning",
    why="one lucky run proves nothing; a rank needs a declared batch whose mean is below the target with p < 0.01",
    hint="`speedrun stats RECORD` computes the number of runs it would take; declare a new batch of that size",
)
def _proves(record: Record) -> Iterator[str]:
    rules, target = record.rules.rules, record.rules.target
    if not rules.ranked:
        raise Skip("this track does not rank")
    if not record.finished:
        raise Skip("no run finished")
    if len(record.finished) < rules.min_runs:
        yield f"{len(record.finished)} of the {rules.min_runs} runs that a rank needs"
    if record.declaration is None:
        if len(record.runs) == 1:  # V306 reports several
            yield "no batch was declared, so no test was made"
        return
    test = batch_status(record.declaration, record.runs, target.loss, target.sigma).test
    if test is not None and not test.passed and isfinite(test.mean):  # V303 and V309 report the others
        yield f"mean {test.mean:.5f} of {test.num_runs} runs: p = {test.p:.2g}, need less than {test.alpha:g}"


@check(
    "V303 all declared runs are there, and no others",
    why="leaving out runs or adding some is choosing the result",
    hint="`speedrun batch --resume RECORD` runs what is missing; a larger batch needs a new declaration",
)
def _all_there(record: Record) -> Iterator[str]:
    declared, target = record.declaration, record.rules.target
    if declared is None or not record.finished:
        raise Skip("no run finished" if declared else "no batch was declared")
    progress = batch_status(declared, record.runs, target.loss, target.sigma)
    done = completed(record.runs).keys()
    yield from (f"seed {seed} was declared, but none of its runs ended" for seed in progress.missing)
    yield from (f"seed {seed} was not declared" for seed in sorted(done - set(declared.seeds)))
    if not progress.missing and (more := done & set(declared.seeds[len(progress.losses) :])):
        yield f"seeds {sorted(more)} were run after the batch was decided"
    crashed = [run for run in record.runs if run.outcome == "aborted"]
    for run in crashed:
        if run.vals and run.vals[-1].step == run.start.num_steps:
            yield f"{run.folder}: crashed when its result was known, so it had to count"
    # Only up to the deciding look: a second look that is never reached permits no more broken runs.
    needed = len(progress.losses) + len(progress.missing)
    if len(crashed) > (allowed := allowed_crashes(needed)):
        yield f"{len(crashed)} runs crashed; of {needed}, {allowed} may"


@check(
    "V304 all runs are distinct",
    why="one run under several seeds is one observation, but could make any test pass",
    hint="take the copies out, and run the declared seeds",
)
def _distinct(record: Record) -> Iterator[str]:
    runs = [(run, _facts(run) | {"starting state": run.of(runlog.WarmupStart)}) for run in record.finished]
    for (one, theirs), (run, mine) in combinations(runs, 2):
        yield from (f"{run.folder}: same {what} as {one.folder}" for what in _shared(mine, theirs))


@check(
    "V305 all runs stop at the declared step",
    why="stopping a run when its loss is low is choosing the result",
    hint="the recipe sets the number of steps; let every run reach its end",
)
def _one_end(record: Record) -> Iterator[str]:
    steps = {run.folder: run.start.num_steps for run in record.runs}
    if record.declaration is not None:
        steps["batch.json"] = record.declaration.num_steps
    steps |= {f"the config of {run.folder}": _stage_steps(run.start.config) for run in record.runs}
    if len(set(steps.values())) > 1:
        yield "numbers of steps differ: " + ", ".join(f"{name} {number:,}" for name, number in steps.items())


def _stage_steps(config: dict[str, Any]) -> int:
    """Return the steps of all stages in a resolved config, which is untrusted; 0 if there are none."""
    match config:
        case {"recipe": {"stages": list() as stages}}:
            counts = [stage.get("num_steps") for stage in stages if isinstance(stage, dict)]
            return sum(count for count in counts if isinstance(count, int))
    return 0


def unfollowed(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that no other run resumes: one, however often an honest run was killed.

    If a run was killed before its first checkpoint, a later one resumes the same earlier run. One that was killed
    before its clock began trained nothing, so it counts neither as a run nor as one that goes on.
    """
    begun = [run for run in runs if run.of(runlog.ClockStart)]
    left_off = {run.origin.run_id for run in begun}

    def is_replaced(run: Run) -> bool:
        knew_result = bool(run.vals) and run.vals[-1].step == run.start.num_steps
        later = (other.origin.run_id for other in begun if other.began_after(run) and other.resumed)
        return run.resumed and run.outcome == "aborted" and not knew_result and run.origin.run_id in later

    return [run for run in begun if run.folder not in left_off and not is_replaced(run)]


@check(
    "V306 the batch was declared before its first run, and describes its runs",
    why="a number of runs chosen after the first results proves nothing",
    hint="declare with `speedrun batch`, which writes the declaration first; do not join runs afterwards",
)
def _declared_before(record: Record) -> Iterator[str]:
    declared = record.declaration
    if declared is None and len(begun := unfollowed(record.runs)) > 1:
        yield f"{len(begun)} runs, but no {layout.BATCH} that declared them"
    # A log that names the digest began after the declaration; wall clocks can be set back.
    sha256 = layout.sha256(record.raw[layout.BATCH]) if declared else ""
    for run in record.runs:
        yield same(f"{run.folder}: the sha256 of its {layout.BATCH}", run.start.batch_sha256, sha256)
    if declared is None:
        return
    first = record.runs[0].start  # other checks compare the runs with each other
    rules = TrackRef(first.track, first.track_sha256)
    recipe = layout.Recipe(first.recipe, first.recipe_revision, first.overrides)
    stated = declared.track, declared.recipe, declared.config_sha256, declared.source_sha256
    if stated != (rules, recipe, first.config_sha256, first.source_sha256):
        yield f"{layout.BATCH}: declares another track, recipe, config or source than ran"
    config = first.config
    split = config.get("num_devices"), config.get("microbatches"), config.get("attention"), first.purpose
    if split != (declared.num_devices, declared.microbatches, declared.attention, declared.purpose):
        yield f"{layout.BATCH}: declares other devices, micro-batches, kernels or another purpose than ran"
    yield same(f"{layout.BATCH}: different seeds", len({*declared.seeds}), len(declared.seeds))
    follow = seeds_from(declared.source_sha256, declared.config_sha256, len(declared.seeds))
    if not declared.seeds_chosen and declared.seeds != follow:
        yield f"{layout.BATCH}: claims that its seeds follow from source and config, but they do not"
    some = seeds_from(declared.source_sha256, declared.config_sha256, _MOST_DERIVED)
    if declared.seeds_chosen and declared.seeds != follow and (derived := set(declared.seeds) & set(some)):
        yield f"{layout.BATCH}: {len(derived)} chosen seeds follow from source and config, but others are left out"
    counts = [look.num_runs for look in declared.looks]
    fit = 0 < len(counts) <= 2 and counts == sorted({*counts}) and counts[-1] == len(declared.seeds)
    if not fit or counts[0] < 1:
        yield f"{layout.BATCH}: looks after {counts} runs do not fit {len(declared.seeds)} seeds"
        return
    due = looks(counts[0], counts[1] if len(counts) > 1 else None, record.rules.target.sigma)
    yield same(f"{layout.BATCH}: its looks", declared.looks, due)


@check(
    "V307 the losses have the noise of the track",
    why="losses of different seeds scatter by a known amount; a batch that does not was copied or edited",
    hint="run every seed separately, from its own initialisation",
)
def _scatter(record: Record) -> Iterator[str]:
    """One-sided chi-squared test that the sample variance is not below the track's."""
    sigma, losses = record.rules.target.sigma, [run.val_loss for run in record.finished]
    if sigma is None:
        raise Skip("the noise of this track is not known")
    if len(losses) < _FEWEST:
        return
    freedom, sd = len(losses) - 1, stdev(losses)
    if chi2_cdf(freedom, freedom * (sd / sigma) ** 2) < _TOO_CLOSE:
        yield f"sd {sd:.2g} of {len(losses)} losses; seeds of this track differ by {sigma:.2g}"


@check(
    "V312 no run appears in another record",
    why="a run in two records is one observation, and a seed could be run again until the result fits",
    hint="keep a run only in the record for which it was made; declare a batch with new seeds",
)
def _nowhere_else(record: Record) -> Iterator[str]:
    """The record that was merged later is the copy; if neither was merged, the one that began later."""
    root = record.root.resolve()
    mine, others = f"{root.parent.name}/{root.name}", list(_of_other_records(root))
    for run in record.finished:
        facts = _facts(run)
        for place, begun, theirs in others:
            if not (same := _shared(facts, theirs)):
                continue
            first = git_history.added_first(root.parent.parent, (mine, place))
            if first != mine and (first is not None or begun <= run.begun):
                yield f"{run.folder}: same {same[0]} as {theirs['name']} of {place}"


def _facts(run: Run) -> dict[str, object]:
    """Return facts in which any two finished runs differ."""
    start, losses = run.start, frozenset((step.step, step.loss) for step in run.steps)
    return {
        "name": start.run_id,
        "seed, source and config": (start.seed, start.source_sha256, start.config_sha256),
        "list of losses": losses if len(losses) >= _FEWEST else None,
        "list of times": frozenset(enumerate(round(seconds * 1e9) for seconds in run.step_s)),
        "final state": run.final_hash,
        "place of held-out text": [one.nonce for one in run.of(runlog.HeldOut)[-1:]],
    }


def _shared(mine: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """Return the names of equal facts. Lists count as equal if half of the entries are, since a few could be edited."""

    def is_same(a: object, b: object) -> bool:
        if isinstance(a, frozenset) and isinstance(b, frozenset):
            return 2 * len(a & b) >= max(1, len(a), len(b))
        return bool(a) and a == b

    return [what for what in mine if is_same(mine[what], theirs[what])]


@lru_cache(maxsize=1024)
def _read(log: Path, _size_bytes: int, _changed_ns: int) -> tuple[datetime, dict[str, object]] | None:
    """Return when a finished run began, and its facts; size and time are keys of the cache."""
    folder = log.parent.name
    try:
        run = read_run({f"runs/{folder}/{layout.LOG}": log.read_bytes()}, folder)
    except (OSError, FormatError):
        return None
    return (run.begun, _facts(run)) if run.finished else None


def _of_other_records(root: Path) -> Iterator[tuple[str, datetime, dict[str, object]]]:
    """Yield path, start and facts of all finished runs of other records, if this record is a committed one."""
    if root.parent.parent.name != _COMMITTED:
        return
    for log in sorted(root.parent.parent.glob(f"*/*/runs/*/{layout.LOG}")):
        folder = log.parent.parent.parent
        if folder != root and log.is_file() and not log.is_symlink():
            stat = log.stat()
            if found := _read(log, stat.st_size, stat.st_mtime_ns):
                yield f"{folder.parent.name}/{folder.name}", *found
