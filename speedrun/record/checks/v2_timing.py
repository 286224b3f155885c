"""V201 to V210: the train time is consistent and possible."""

import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from statistics import median

from speedrun.base import runlog
from speedrun.record.checks.table import at_most, check_run, same
from speedrun.record.logged_run import Run
from speedrun.record.reader import Record

#: Most between reading the clock and stamping an event; on a quiet machine it is 0.1 ms. Ranked runs have processors to
#: spare; two cores with five busy processes stamped one of 160 steps 0.11 s late.
_SLACK_S, _BUSY_SLACK_S = 0.1, 0.3
#: A forward pass is one third of a training step's arithmetic.
_FORWARD_SHARE = 1 / 3
#: Fewer steps can be equal by chance.
_FEWEST_STEPS = 4
#: Longest pause: a constant, plus a multiple of the training time for as many tokens.
_MOST_PAUSE_S, _MOST_PAUSE_SHARE = 10.0, 3.0
_MOST_END_S = 300.0  #: the constant after the stop: digests of shards, a checkpoint and the second benchmark
_MOST_SLOWER = 10.0  #: factor on pauses, for a machine whose speed changed
_BENCH_SLACK = 1.25  #: other programs may have slowed the benchmark more than the run
#: One letter for each event: their order must match `_SHAPE`.
_LETTERS: dict[type, str] = {runlog.Step: "s", runlog.Checkpoint: "c", runlog.Val: "v", runlog.HeldOut: "h"}
_LETTERS |= {runlog.ClockStart: "(", runlog.ClockPause: "[", runlog.ClockResume: "]", runlog.ClockStop: ")"}
#: Steps only while the clock runs, one validation alone in each pause, one after the stop, then the held-out text.
_SHAPE = re.compile(r"\([sc]*(\[v\][sc]*)*\)c?vc?h?")


@check_run(
    "V201 time increases, and never evenly",
    why="every time in the record is a difference of stamps; one that decreases makes all of them doubtful",
    hint="if the log was not edited, the machine's clock is broken; use another machine",
)
def _monotonic(run: Run, _record: Record) -> Iterator[str]:
    for before, after in pairwise(run.lines):
        if after.t_mono_ns <= before.t_mono_ns:
            back_ns = before.t_mono_ns - after.t_mono_ns
            yield f"line {after.i + 1} is stamped {back_ns:,} ns before the line above"
            break
    if len(run.step_s) >= _FEWEST_STEPS and len({round(seconds * 1e9) for seconds in run.step_s}) == 1:
        yield f"all {len(run.step_s)} steps took {run.step_s[0]:.9f} s, but real steps differ by nanoseconds"
    for (_, before_s, _), (line, after_s, _) in pairwise([(0, run.origin.train_time_s, 0.0), *_stamped(run)]):
        if after_s < before_s:
            yield f"line {line} has a train time {before_s - after_s:.6f} s before the one above"
            break


@check_run(
    "V202 steps, clock events and stamps give one train time",
    why="the train time is stated and stamped, and an edit must change both",
    hint="leave timing to the harness; a recipe neither reads nor stops the clock",
)
def _clock_total(run: Run, record: Record) -> Iterator[str]:
    yield from _drift(run, record)
    yield same("seconds in run_end", run.end.train_time_s, run.train_time_s)


def _drift(run: Run, record: Record) -> Iterator[str]:
    """Yield the first event whose train time is not that of its stamp. A stamp may be late if the next one is not."""
    slack_s = _SLACK_S if record.rules.rules.ranked else _BUSY_SLACK_S
    stamped = [*_stamped(run)]
    late_s = accumulate((stamped_s - stated_s for _, stated_s, stamped_s in reversed(stamped)), min)
    for (line, stated_s, stamped_s), least_s in zip(stamped, reversed([*late_s]), strict=True):
        if stamped_s < stated_s - slack_s or least_s > slack_s:
            yield same(f"line {line}: seconds by its stamp", stated_s, stamped_s)
            return


def _stamped(run: Run) -> Iterator[tuple[int, float, float]]:
    """Yield for each event of the clock its line, and its train time as it states it and by the stamps."""
    running_ns, since_ns = round(run.origin.train_time_s * 1e9), 0
    for line in run.lines:
        match line.event:
            case runlog.ClockStart():
                since_ns = line.t_mono_ns
                continue
            case runlog.ClockResume(train_time_s=stated_s):
                since_ns = line.t_mono_ns
            case runlog.Step(train_time_s=stated_s):
                pass
            case runlog.ClockPause(train_time_s=stated_s) | runlog.ClockStop(train_time_s=stated_s):
                running_ns, since_ns = running_ns + line.t_mono_ns - since_ns, line.t_mono_ns
            case _:
                continue
        yield line.i + 1, stated_s, (running_ns + line.t_mono_ns - since_ns) / 1e9


@check_run(
    "V210 a resumed run goes on where the other one was",
    of="runs",
    why="its time, tokens and state begin with those of the other run, which it could state otherwise",
    hint="keep the log of the run that it resumes, as the harness wrote it",
)
def _goes_on(run: Run, record: Record) -> Iterator[str]:
    """Also of runs that crashed, which are a part of the chain."""
    if run.resumed:
        other = next((one for one in record.runs if one.folder == run.origin.run_id), None)
        yield from _jumps(run, other, record)


def _jumps(run: Run, other: Run | None, record: Record) -> Iterator[str]:
    """Yield where a resumed run does not begin where the other one was."""
    origin = run.origin
    if origin.step == 0:  # or from given weights
        spent = origin.train_time_s, origin.tokens_seen, origin.cursor
        yield same("seconds, tokens and cursor at step 0", spent, (0, 0, (0, 0)))
        return
    if other is None or other.start.seed != run.start.seed:
        yield f"resumes {origin.run_id}, of which there is no log with its seed"
        return
    yield from (f"{other.folder}: {problem}" for problem in _drift(other, record))
    # Without its own origin: who saved a state has trained, so no chain of runs ends where it began.
    places: dict[int, runlog.Step | runlog.Resume] = {step.step + 1: step for step in other.steps}
    at = since = places.get(origin.step)
    for fleet in run.of(runlog.Islands):
        # A driver keeps time and tokens before it logs a round, and may be killed between.
        before = (origin.step - 1) // fleet.every * fleet.every
        since = places.get(before, other.origin if other.origin.step == before else None)
    if since is None:
        yield f"resumes {other.folder} after step {origin.step}, which it did not log"
        return
    if at:
        begun = origin.tokens_seen, origin.cursor
        yield same(f"tokens and cursor, as in {other.folder}", begun, (at.tokens_seen, at.cursor))
    yield at_most(f"seconds of {other.folder}", since.train_time_s, origin.train_time_s)
    yield at_most(f"tokens of {other.folder}", since.tokens_seen, origin.tokens_seen)
    kept = [event.state_hash for event in other.of(runlog.Checkpoint) if event.step == origin.step]
    if kept and origin.state_hash not in kept:
        yield same(f"its first state, as {other.folder} kept it", origin.state_hash, kept[0])


@check_run(
    "V204 the clock pauses only for the declared validations",
    why="a pause is free time, so it may hold only a validation that the track declares",
    hint="validate exactly when the track says",
)
def _pauses(run: Run, record: Record) -> Iterator[str]:
    num_steps = run.start.num_steps
    want = [step for step in range(run.origin.step, num_steps) if record.rules.validates_at(step)]
    want.append(num_steps)
    done, got = run.origin.step, []
    for line in run.lines:
        done += isinstance(line.event, runlog.Step)
        if isinstance(line.event, runlog.Val):
            got.append(line.event.step)
            yield same(f"line {line.i + 1}: the step of its validation", got[-1], done)
    yield same("steps of validations", got, want)
    yield same(
        "reasons of pauses", {pause.reason for pause in run.of(runlog.ClockPause)} - {"validation"}, set()
    )
    shape = "".join(_LETTERS.get(type(line.event), "") for line in run.lines)
    if not _SHAPE.fullmatch(shape):
        yield "a step lies outside the clock, a validation outside a pause, or a pause holds no validation"


@check_run(
    "V205 a validation takes a plausible time",
    severity="error if ranked",
    why="a validation faster than its arithmetic scored nothing, and a long pause can hide work",
    hint="look for cached scores, or a benchmark on a busy machine; run again",
)
def _val_time(run: Run, _record: Record) -> Iterator[str]:
    """At least a forward pass at the benchmarked speed; at most a multiple of the training time for its tokens."""
    (plan,), (slowest, fastest) = run.of(runlog.Plan), run.bench_gflops
    slower = min(_MOST_SLOWER, fastest / slowest) if slowest > 0 else 1.0
    token_s = run.steps[-1].train_time_s / run.steps[-1].tokens_seen if run.steps else 0.0
    paused_ns, scored, scoring_s = 0, 0, 0.0
    for line in run.lines:
        match line.event.val if isinstance(line.event, runlog.HeldOut) else line.event:
            case runlog.ClockPause() | runlog.ClockStop():
                paused_ns, scored, scoring_s = line.t_mono_ns, 0, 0.0
            case runlog.Val() as val:
                scored, scoring_s = scored + val.tokens, scoring_s + val.seconds
                flops = val.tokens * plan.flops_per_token * _FORWARD_SHARE
                need_s = flops / (fastest * 1e9) if fastest else 0.0
                if val.seconds < need_s or val.seconds <= 0:
                    yield f"step {val.step}: {val.seconds:.6f} s for {val.tokens:,} tokens; need {need_s:.6f} s"
            case runlog.ClockResume() | runlog.RunEnd():
                pause_s = (line.t_mono_ns - paused_ns) / 1e9
                rest_s = _MOST_PAUSE_S if isinstance(line.event, runlog.ClockResume) else _MOST_END_S
                most_s = rest_s + slower * _MOST_PAUSE_SHARE * token_s * scored
                if pause_s > most_s:
                    yield f"line {line.i + 1}: a pause of {pause_s:.1f} s; at most {most_s:.1f} s for its tokens"
                yield at_most(f"line {line.i + 1}: seconds of scoring", scoring_s, pause_s + _BUSY_SLACK_S)


@check_run(
    "V206 nothing is compiled while the clock runs",
    why="programs are compiled before the clock starts; compiling later could hide in a pause",
    hint="look for a shape or dtype that changes after the warm-up",
)
def _no_compile(run: Run, _record: Record) -> Iterator[str]:
    """Pauses and the last validation count as running, since they could hide a compilation."""
    for line in run.lines[run.line_of(runlog.ClockStart).i :]:
        if isinstance(line.event, runlog.Compile):
            yield f"line {line.i + 1}: {line.event.name} was compiled after the clock started"


@check_run(
    "V207 the warm-up left nothing in the state",
    why="warm-up steps are not timed, so they must not train",
    hint="rebuild the state from the seed after the warm-up",
)
def _warm_up(run: Run, _record: Record) -> Iterator[str]:
    hashes = [event.state_hash for event in (*run.of(runlog.WarmupStart), *run.of(runlog.WarmupEnd))]
    yield same("states before and after the warm-up", hashes, (hashes or [""])[:1] * 2)


@check_run(
    "V208 untimed work is short",
    why="without a limit, work would move from the timed part to the untimed one",
    hint="compile less, or fill the compilation cache first",
)
def _untimed(run: Run, record: Record) -> Iterator[str]:
    spent_s = (run.line_of(runlog.ClockStart).t_mono_ns - run.lines[0].t_mono_ns) / 1e9
    yield at_most("seconds before the clock", spent_s, record.rules.rules.untimed_cap_s)


@check_run(
    "V209 the benchmarked speed is not beaten",
    severity="error if ranked",
    why="the host can run ahead of the devices; a step that is too fast was not waited for",
    hint="wait for the devices before reading the clock, or run again on an idle machine",
)
def _throughput(run: Run, _record: Record) -> Iterator[str]:
    if not run.steps:  # resumed after the last step, only to validate
        return
    (plan,), (_, fastest) = run.of(runlog.Plan), run.bench_gflops
    steps = [(step.batch_tokens, seconds) for step, seconds in zip(run.steps, run.step_s, strict=True)]
    seen, begun = run.steps[-1].tokens_seen, run.origin  # without the run that it resumes
    whole = seen - begun.tokens_seen, run.train_time_s - begun.train_time_s
    if run.of(runlog.Islands):  # all steps of a round end with it
        steps = [whole]
    for what, parts in (("median step", steps), ("whole run", [whole])):
        rates = [tokens / seconds if seconds > 0 else float("inf") for tokens, seconds in parts]
        gflops = plan.flops_per_token * median(rates) / 1e9
        if not 0 < gflops <= _BENCH_SLACK * fastest:
            yield f"{what}: {gflops:,.1f} Gflop/s, the benchmark reached {fastest:,.1f}"
