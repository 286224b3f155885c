"""V201 to V212: the train time is what the clock could have shown."""

from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from statistics import median

from speedrun.ground import runlog
from speedrun.ledger.checks.table import check_run
from speedrun.ledger.record import Record
from speedrun.ledger.run import Run

#: Two readings of one time may differ by the larger of these: an event is stamped after the clock was read.
_SLACK_S = 0.05
_SLACK_SHARE = 0.005
#: A forward pass is one third of a training step's arithmetic.
_FORWARD_SHARE = 1 / 3
#: Fewer steps can be equal by chance.
_FEWEST_STEPS = 4
#: By so much may the UTC of a machine be set while a run goes on.
_SET_S = 2.0
#: A pause may take so long, and so many times what training takes for as many tokens.
_MOST_PAUSE_S, _MOST_PAUSE_SHARE = 10.0, 3.0
#: Times the median step.
_OUTLIER = 10.0


def _agree(a_s: float, b_s: float) -> bool:
    return abs(a_s - b_s) <= max(_SLACK_S, _SLACK_SHARE * abs(b_s))


@check_run(
    "V201",
    "time goes on, and never evenly",
    why="every time in the record is a difference of stamps; a stamp that goes back makes all of them doubtful",
    hint="if the log was not edited, the machine's clock is broken: run on another one",
)
def monotonic(run: Run, _record: Record) -> Iterator[str]:
    """Stamps of the log, and train time from step to step. Steps of a machine differ by nanoseconds at least."""
    for before, after in pairwise(run.lines):
        if after.t_mono_ns <= before.t_mono_ns:
            back_ns = before.t_mono_ns - after.t_mono_ns
            yield f"line {after.i + 1} is stamped {back_ns:,} ns before the line above"
            break
    if len(run.step_s) >= _FEWEST_STEPS and len({round(seconds * 1e9) for seconds in run.step_s}) == 1:
        yield f"all {len(run.step_s)} steps took {run.step_s[0]:.9f} s: no clock ticks like this"
    for step, seconds in zip(run.steps, run.step_s, strict=True):
        if seconds < 0:
            yield f"step {step.step} ends {-seconds:.6f} s before the step above"
            break


@check_run(
    "V202",
    "steps, clock events and stamps give one train time",
    why="the train time is told three times, and an edit that forgets one of them shows here",
    hint="leave timing to the harness: a recipe neither reads nor stops the clock",
)
def clock_total(run: Run, _record: Record) -> Iterator[str]:
    """The clock is run again from the stamps of its events."""
    running_ns, since_ns = round(run.origin.train_time_s * 1e9), 0
    for line in run.lines:
        match line.event:
            case runlog.ClockStart() | runlog.ClockResume():
                since_ns = line.t_mono_ns
            case runlog.ClockPause(train_time_s=stated_s) | runlog.ClockStop(train_time_s=stated_s):
                running_ns += line.t_mono_ns - since_ns
                if not _agree(stated_s, running_ns / 1e9):
                    yield f"line {line.i + 1} says {stated_s:.3f} s, the stamps {running_ns / 1e9:.3f} s"
    total_s = run.train_time_s
    last_s = run.steps[-1].train_time_s if run.steps else run.origin.train_time_s
    if not _agree(last_s, total_s):
        yield f"the last step ends at {last_s:.3f} s, the clock stops at {total_s:.3f} s"
    if run.end.train_time_s != total_s:
        yield f"run_end says {run.end.train_time_s:.3f} s, clock_stop {total_s:.3f} s"


@check_run(
    "V203",
    "the train time fits into the wall time",
    why="the stamps in UTC come from another clock than the train time, so both would have to be forged",
    hint="keep the machine's time from being set during a run, and run again",
)
def wall_time(run: Run, _record: Record) -> Iterator[str]:
    """By the stamps in UTC, which another clock made; and both clocks go at one pace."""
    begun, ended = (
        datetime.fromisoformat(run.line_of(kind).t_utc) for kind in (runlog.ClockStart, runlog.ClockStop)
    )
    span_s = (ended - begun).total_seconds()
    for wall, wall_s in (("the stamps in UTC span", span_s), ("the cold wall time is", run.end.cold_wall_s)):
        if wall_s < run.own_time_s and not _agree(run.own_time_s, wall_s):
            yield f"{wall} {wall_s:.3f} s, the train time {run.own_time_s:.3f} s"
    first, last = run.lines[0], next(line for line in run.lines[::-1] if isinstance(line.event, runlog.Val))
    log_s = (last.t_mono_ns - first.t_mono_ns) / 1e9
    if run.end.cold_wall_s < log_s and not _agree(run.end.cold_wall_s, log_s):
        yield f"the cold wall time is {run.end.cold_wall_s:.3f} s, the log alone spans {log_s:.3f} s"
    for line in run.lines:
        mono_s = (line.t_mono_ns - first.t_mono_ns) / 1e9
        utc_s = (datetime.fromisoformat(line.t_utc) - run.begun).total_seconds()
        if abs(utc_s - mono_s) > _SET_S + _SLACK_SHARE * mono_s:
            yield f"line {line.i + 1}: {utc_s:,.3f} s after the first one in UTC, {mono_s:,.3f} s by the other clock"
            break


@check_run(
    "V204",
    "the clock pauses for the declared validations only",
    needs=("runs", "track"),
    why="a pause is free time: it may hold a validation that the track declares, and nothing else",
    hint="validate when the track says, not when a recipe likes",
)
def pauses(run: Run, record: Record) -> Iterator[str]:
    """One validation in each pause, the last one after the clock stopped."""
    num_steps = run.start.num_steps
    want = [step for step in range(run.origin.step, num_steps) if record.rules.validates_at(step)] + [
        num_steps
    ]
    got = [val.step for val in run.vals]
    if got != want:
        yield f"validated before steps {_some(got)}; the track says {_some(want)}"
    places = [_letter(line.event) for line in run.lines]
    shape = "".join(place for place in places if place)
    if shape != "(" + "[v]" * (len(run.vals) - 1) + ")v":
        yield "a validation lies outside a pause, or a pause holds none"


def _letter(event: runlog.AnyEvent) -> str:
    """The clock's events as a word over ( [ v ] )."""
    match event:
        case runlog.ClockStart():
            return "("
        case runlog.ClockPause():
            return "["
        case runlog.Val():
            return "v"
        case runlog.ClockResume():
            return "]"
        case runlog.ClockStop():
            return ")"
    return ""


def _some(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return f"{shown}, ... ({len(steps)})" if len(steps) > 8 else shown


@check_run(
    "V205",
    "validations take the time they need",
    why="a validation faster than its own arithmetic scored nothing, and a longer one hides work in a pause",
    hint="look for scores that are kept from before, or a bench on a busy machine; run again",
)
def val_time(run: Run, _record: Record) -> Iterator[str]:
    """At least the arithmetic of a forward pass at the benched speed; no longer than its pause, which has a bound."""
    (plan,), (hw,) = run.of(runlog.Plan), run.of(runlog.Preflight)
    peak_flops = hw.matmul_gflops * 1e9
    for val in run.vals:
        need_s = val.tokens * plan.flops_per_token * _FORWARD_SHARE / peak_flops if peak_flops > 0 else 0.0
        if val.seconds < need_s or val.seconds <= 0:
            yield f"step {val.step}: {val.seconds:.6f} s for {val.tokens:,} tokens; need {need_s:.6f} s"
    last = run.steps[-1] if run.steps else None
    token_s = last.train_time_s / last.tokens_seen if last and last.tokens_seen > 0 else 0.0
    paused_ns = 0
    inside: list[runlog.Val] = []
    for line in run.lines:
        match line.event:
            case runlog.ClockPause():
                paused_ns, inside = line.t_mono_ns, []
            case runlog.Val() as val:
                inside.append(val)
            case runlog.ClockResume():
                pause_s, val_s = (line.t_mono_ns - paused_ns) / 1e9, sum(val.seconds for val in inside)
                if pause_s < val_s and not _agree(pause_s, val_s):
                    yield f"line {line.i + 1}: a pause of {pause_s:.3f} s for a validation of {val_s:.3f} s"
                most_s = _MOST_PAUSE_S + _MOST_PAUSE_SHARE * token_s * sum(val.tokens for val in inside)
                if pause_s > most_s:
                    yield f"line {line.i + 1}: a pause of {pause_s:.1f} s; at most {most_s:.1f} s for its tokens"


@check_run(
    "V206",
    "nothing is compiled while the clock runs",
    why="compiling is the one slow thing that may be done before the clock, so none may be left for later",
    hint="compile every stage ahead of time: a shape or dtype changed after the warm-up",
)
def no_compile(run: Run, _record: Record) -> Iterator[str]:
    """Pauses count as running: compiling in one would be hidden."""
    begun, ended = run.line_of(runlog.ClockStart).i, run.line_of(runlog.ClockStop).i
    for line in run.lines[begun:ended]:
        if isinstance(line.event, runlog.Compile):
            yield f"line {line.i + 1}: {line.event.name} compiled in the clock"


#: A bench may have been disturbed where the run was not.
_BENCH_SLACK = 1.25


@check_run(
    "V207",
    "the warm-up taught nothing",
    why="warm-up steps are not timed, so nothing of them may stay in the state",
    hint="rebuild the state from the seed after the warm-up",
)
def warm_up(run: Run, _record: Record) -> Iterator[str]:
    """The state before the first step is the initial one."""
    hashes = [event.state_hash for event in (*run.of(runlog.WarmupStart), *run.of(runlog.WarmupEnd))]
    complete = len(hashes) == 2 or not run.finished
    if not complete or not {run.file.init_hash}.issuperset(hashes):
        yield "the state hashes before and after the warm-up and in run.json are not one"


@check_run(
    "V208",
    "what is not timed is short",
    needs=("runs", "track"),
    why="without a cap, work would move from the timed part to the untimed one",
    hint="compile less, or fill the compilation cache first",
)
def untimed(run: Run, record: Record) -> Iterator[str]:
    """From the first line to the start of the clock."""
    cap_s = record.rules.rules.untimed_cap_s
    spent_s = (run.line_of(runlog.ClockStart).t_mono_ns - run.lines[0].t_mono_ns) / 1e9
    if spent_s > cap_s:
        yield f"{spent_s:.1f} s before the clock; the track allows {cap_s:.1f} s"


@check_run(
    "V209",
    "no step beats the benched speed",
    why="the host can run ahead of the devices: a step that is too fast was not waited for",
    hint="wait for the devices before the clock is read, or bench again on an idle machine",
)
def throughput(run: Run, _record: Record) -> Iterator[str]:
    """Model arithmetic a second, in the median step and in total, against the preflight's matmul."""
    if not run.steps:  # it went on from the last step, to be scored
        return
    (plan,), (hw,) = run.of(runlog.Plan), run.of(runlog.Preflight)
    per_step = [
        step.batch_tokens / seconds if seconds > 0 else float("inf")
        for step, seconds in zip(run.steps, run.step_s, strict=True)
    ]
    tokens = run.steps[-1].tokens_seen - run.origin.tokens_seen
    total = tokens / run.own_time_s if run.own_time_s > 0 else float("inf")
    for what, tokens_per_s in (("median step", median(per_step)), ("whole run", total)):
        gflops = plan.flops_per_token * tokens_per_s / 1e9
        if not 0 < gflops <= _BENCH_SLACK * hw.matmul_gflops:
            yield f"{what}: {gflops:,.1f} Gflop/s, the bench reached {hw.matmul_gflops:,.1f}"


@check_run(
    "V210",
    "no step stands out",
    severity="warning",
    why="one slow step can be a busy machine or hidden work, and both are worth a look",
    hint="run again on a machine that nobody shares; if the step stays slow, look what it does",
)
def outliers(run: Run, _record: Record) -> Iterator[str]:
    """A warning only: shared machines stutter."""
    usual_s = median(run.step_s or [0.0])
    slow = [step for step, seconds in enumerate(run.step_s) if seconds > _OUTLIER * usual_s]
    if slow:
        usual = f"the median of {usual_s * 1e3:.1f} ms"
        yield f"{len(slow)} step(s) took over {_OUTLIER:.0f} x {usual}: {_some(slow)}"


@check_run(
    "V212",
    "the sums at the end are those of the log",
    why="what a run says of itself at its end is what people read; each number of it stands in the log once more",
    hint="restore the log: the run adds up what it logged",
)
def sums(run: Run, _record: Record) -> Iterator[str]:
    """Compiling, warm-up, validation, and the phases of the wall time, against their events and stamps."""
    end = run.end
    logged = {
        "compile_s": (end.compile_s, sum(event.seconds for event in run.of(runlog.Compile))),
        "warmup_s": (end.warmup_s, sum(event.seconds for event in run.of(runlog.WarmupEnd))),
        "val_s": (end.val_s, sum(val.seconds for val in run.vals)),
    }
    for name, (stated_s, logged_s) in logged.items():
        if not _agree(stated_s, logged_s):
            yield f"run_end says {name} {stated_s:.3f}, the events {logged_s:.3f}"
    if not 0 <= end.data_wait_s <= run.own_time_s + _SLACK_S:
        yield f"waited {end.data_wait_s:.3f} s for data in {run.own_time_s:.3f} s of training"
    if end.lost_s < 0 or (end.lost_s and not run.resumed):
        yield f"lost {end.lost_s:.3f} s to earlier processes, and goes on from none"
    if end.phases:  # older runs told none
        yield from _phases(run)


def _phases(run: Run) -> Iterator[str]:
    """Each is as long as what the log tells of it; together they are the wall time."""
    end, spent = run.end, run.end.phases
    if min(spent.values()) < 0:
        yield "a phase took less than no time"
    last = next(line for line in run.lines[::-1] if isinstance(line.event, runlog.Val))
    wall_s = end.cold_wall_s + (run.lines[-1].t_mono_ns - last.t_mono_ns) / 1e9
    if not _agree(sum(spent.values()), wall_s):
        yield f"the phases sum to {sum(spent.values()):.3f} s, the wall time up to the end is {wall_s:.3f} s"
    trained_s = spent.get("step", 0.0) + spent.get("data", 0.0)
    kept_s = spent.get("checkpoint", 0.0)
    # The clock may have run while the state was copied, or not.
    if abs(trained_s - run.own_time_s) > kept_s and not _agree(trained_s, run.own_time_s):
        yield f"the phases have {trained_s:.3f} s of training, the clock {run.own_time_s:.3f} s"
    for phase, least_s in (("compile", end.compile_s), ("warm-up", end.warmup_s), ("evaluation", end.val_s)):
        if spent.get(phase, 0.0) < least_s - _SLACK_S:
            yield f"phase {phase} took {spent.get(phase, 0.0):.3f} s, what was done in it {least_s:.3f} s"
