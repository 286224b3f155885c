"""V101 to V107: the right tokens were read, in order, once, without the validation tokens."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise

from speedrun.base import runlog
from speedrun.record.checks.table import Skip, check, check_run, same
from speedrun.record.checks.v5_source import leaves
from speedrun.record.logged_run import Run
from speedrun.record.reader import Record


@check(
    "V101 the shards are the track's",
    before="run",
    why="the same loss on other text is another result",
    hint="get the track's shards, check them with `speedrun data verify --full`, and run again",
)
def _shard_hashes(record: Record) -> Iterator[str]:
    if not (table := record.rules.data.sha256):
        raise Skip(f"{record.rules.id} lists no digests")
    for run in record.finished:
        for shard in (*run.data.shards, run.data.val_shard):
            yield same(f"{run.folder}: the sha256 of {shard.name}", shard.sha256, table.get(shard.name))


@check_run(
    "V102 tokens are read in order, from the first token of the first shard",
    before="run",
    why="choosing the order of the data influences the loss",
    hint="keep all shards of the track in the folder, under their own names, and run again",
)
def _shard_order(run: Run, record: Record) -> Iterator[str]:
    rules = record.rules.data
    (data,) = run.of(runlog.DataReady)
    listed = [name for name in data.train_shards if name != data.val_shard]  # V103 reports the others
    if listed != sorted(set(listed)):
        yield "the list of training shards is not sorted by name"
    known = sorted(name for name in rules.sha256 if fnmatchcase(name, rules.train))
    if wrong := next((pair for pair in zip(listed, known, strict=False) if pair[0] != pair[1]), None):
        yield "{} is in the place of {}, which comes earlier in the track".format(*wrong)
    elif known and (more := listed[len(known) :]):
        yield f"{more[0]} is not one of the track's shards"
    names = [shard.name for shard in run.data.shards if not _is_scored(shard, run)]
    strangers = sorted({name for name in [*names, *listed] if not fnmatchcase(name, rules.train)})
    if strangers:
        yield f"{strangers[0]} does not match {rules.train}"
    if not run.vals:  # it has not begun
        return
    in_order = list(dict.fromkeys(names))
    num_restarts = sum(after < before for before, after in pairwise(names))
    # A resumed run may start at the end of its shard, and so read from the next one.
    began = run.origin.cursor[0]
    due = [listed[at : at + len(in_order)] for at in range(began, began + 1 + run.resumed)]
    if in_order not in due or num_restarts:
        yield f"read {', '.join(in_order)}; the order is {', '.join(listed)}"
    elif run.steps and not run.of(runlog.Islands) and len(names) == len(run.data.shards):
        yield same("the shard of its last cursor", run.steps[-1].cursor[0], listed.index(in_order[-1]))
    due_at = {listed[began]: run.origin.cursor[1]} if began < len(listed) else {}
    for shard in run.data.shards:
        if shard.start > (due := due_at.get(shard.name, 0)):  # V107 reports what is read again
            yield f"{shard.name} is read from token {shard.start:,}; the next token is {due:,}"
        due_at = {shard.name: shard.stop}
    most = max((step.batch_tokens for step in run.steps), default=0)
    for shard, after in pairwise(run.data.shards):
        if after.name != shard.name and not cuts(run) and (left := shard.tokens - shard.stop) > most + 1:
            yield f"{shard.name} is left {left:,} tokens before its end, but a batch takes only {most:,}"
    reference = next((one for one in record.finished if not one.resumed), run)
    if not run.resumed:  # data must not depend on the seed
        digests = run.end.first_batch_sha256, reference.end.first_batch_sha256
        yield same(f"its first batch, as in {reference.folder}", *digests)


@check_run(
    "V103 no training on the validation shard",
    before="run",
    why="a model that has seen the scored tokens may have memorised them",
    hint="take the shard out of the training data, discard the run, and run again",
)
def _no_leak(run: Run, _record: Record) -> Iterator[str]:
    (data,) = run.of(runlog.DataReady)
    for shard in run.data.shards:
        if _is_scored(shard, run):
            yield f"trained on {shard.name}, which is the validation shard {data.val_shard}"
    if data.val_shard in data.train_shards:
        yield f"{data.val_shard} is in the list of training shards"


def _is_scored(shard: runlog.ShardRange, run: Run) -> bool:
    val = run.data.val_shard
    # Files can be renamed.
    return shard.name == val.name or shard.sha256 == val.sha256


@check_run(
    "V104 every token is counted",
    why="tokens that are read but not counted would be free training",
    hint="tokens seen, batches, cursor and ranges must agree; look for a change of the data stream",
)
def _token_count(run: Run, _record: Record) -> Iterator[str]:
    """If documents are cut, a range holds more than the steps read, so the cursor can only be bounded."""
    if run.of(runlog.Islands):
        raise Skip("trained by islands: see V108")
    if (cut := sum(shard.skipped for shard in run.data.shards)) and not cuts(run):
        yield f"{cut:,} tokens were skipped, but no stage of its recipe cuts documents"
    shards = iter(run.data.shards)
    seen = num_read = run.origin.tokens_seen
    offset, skipped = run.origin.cursor[1], 0
    for step in run.steps:
        seen += step.batch_tokens
        if problem := same(f"step {step.step}: tokens seen", step.tokens_seen, seen):
            yield problem
            return
        while num_read < seen and (shard := next(shards, None)):
            num_read, offset, skipped = num_read + _num_inputs(shard), shard.stop, shard.skipped
        # `offset` is the end of the range that holds token `seen`; `num_read` counts all tokens up to there.
        place = offset - (num_read - seen)
        if not place - skipped <= step.cursor[1] <= place:
            yield f"step {step.step}: the cursor is at {step.cursor[1]:,}, the ranges say {place:,}"
            return
    yield same("tokens in its ranges", num_read + sum(map(_num_inputs, shards)), seen)
    yield same("tokens trained on, as planned", seen, run.of(runlog.Plan)[0].total_tokens)
    if any(after.cursor[0] < before.cursor[0] for before, after in pairwise(run.steps)):
        yield "the cursor moved back to an earlier shard"


def cuts(run: Run) -> bool:
    """Return whether a stage of the recipe cuts documents."""
    settings = leaves(run.start.config.get("recipe"))
    return any(settings[name] for name in settings if fnmatchcase(name, "stages.*.document_tokens"))


def _num_inputs(shard: runlog.ShardRange) -> int:
    return shard.stop - shard.start - shard.skipped


@check_run(
    "V105 exactly the declared tokens are scored",
    before="run",
    why="losses compare only over the same tokens, and over fewer tokens luck matters more",
    hint="score as many tokens as the track declares, from the start of its first validation shard",
)
def _val_tokens(run: Run, record: Record) -> Iterator[str]:
    rules, val = record.rules.data, run.data.val_shard
    if not fnmatchcase(val.name, rules.val):
        yield f"{val.name} does not match {rules.val}"
    scored = {data.val_tokens for data in run.of(runlog.DataReady)} | {event.tokens for event in run.vals}
    yield same("scored positions", (val.start, val.stop, val.skipped), (0, rules.val_tokens, 0))
    yield same("numbers of scored tokens", scored, {rules.val_tokens})
    if run.vals:  # it has begun
        held = [(one.val.step, one.val.tokens) for one in run.of(runlog.HeldOut)]
        due = [(run.start.num_steps, rules.held_tokens)] * bool(rules.held_tokens)
        yield same("steps and tokens of held-out text", held, due)
    first = record.finished[0]
    yield same(f"the scored ids, as in {first.folder}", run.data.val_sha256, first.data.val_sha256)


@check(
    "V106 ranges lie inside their shards",
    why="a range beyond the end of its file cannot have been read",
    hint="look for a swapped shard: a name has one size and digest in all runs of a record",
)
def _shard_sizes(record: Record) -> Iterator[str]:
    known: dict[str, tuple[str, int]] = {}
    for run in record.finished:
        for shard in (*run.data.shards, run.data.val_shard):
            if not shard.start + shard.skipped < shard.stop <= shard.tokens:
                read = f"read {shard.start:,} to {shard.stop:,}"
                yield f"{run.folder}: {shard.name} has {shard.tokens:,} tokens, {read}"
            if known.setdefault(shard.name, (shard.sha256, shard.tokens)) != (shard.sha256, shard.tokens):
                yield f"{run.folder}: {shard.name} is two different files"


@check_run(
    "V107 no position is read twice",
    why="reading a position twice is training for longer than declared",
    hint="get more shards, or train for fewer steps",
)
def _read_once(run: Run, _record: Record) -> Iterator[str]:
    # Files can be renamed; one that was deleted has no digest.
    read = sorted((one.sha256 or one.name, one.start, one.stop, one.name) for one in run.data.shards)
    for (before, _, end, _), (after, start, stop, name) in pairwise(read):
        if before == after and start < end:
            yield f"{name}: {start:,} to {min(end, stop):,} is read twice, a run may once"
