"""The commands that check a record: `validate` and `reproduce`."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import click

from speedrun.base.atomic_files import lock_folder, write_whole
from speedrun.base.console import clean
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.cli import options as cli
from speedrun.record.examine.sandbox import protections
from speedrun.record.logged_run import Run
from speedrun.record.reader import Record, encode, load_result, need_record
from speedrun.record.reproduction import CONFIDENCE, REPRODUCTION, Judgement, NoiseFrom, Point, Verdict
from speedrun.record.statistics import RATE_FROM, Finding, compared
from speedrun.record.validate import Report, Status, find_check
from speedrun.record.validate import validate as checked

if TYPE_CHECKING:
    from speedrun.record.examine.reproduce import Result


Explained = TypedDict("Explained", {"id": str, "severity": str, "title": str, "why": str, "fix": str})
Checked = TypedDict("Checked", {"id": str, "status": Status, "messages": tuple[str, ...]})
Validated = TypedDict("Validated", {"exit_code": int, "results": list[Checked]})
AllValidated = TypedDict("AllValidated", {"exit_code": int, "records": dict[str, Validated]})
Compared = TypedDict("Compared", {"record": Judgement, "candidate": Judgement, "comparison": Finding})

_COLOURS = {"ok": "green", "failed": "red", "warning": "yellow", "skipped": "bright_black"}


@cli.command("speedrun validate records/smoke-cpu/2026-11-29-first", "speedrun validate --explain V104")
def validate(
    ctx: click.Context,
    records: Annotated[tuple[Path, ...], "RECORD..."] = (),
    *,
    strict: Annotated[bool, "Treat warnings as failures."] = False,
    explain: Annotated[str | None, "--explain ID"] = None,
    replay: Annotated[Literal["some", "all"] | None, "--replay [=all]"] = None,
    relower: bool = False,
    nonce: Annotated[str | None, "--nonce HEX"] = None,
    checkpoints: Annotated[tuple[Path, ...], "--checkpoints DIR"] = (),
    verbose: Annotated[bool, "-v,--verbose", "Also show checks that passed or were skipped."] = False,
    unsafe: cli.Unsafe = False,
    data: cli.Data = None,
) -> cli.Answer[Validated | AllValidated | Explained]:
    """Check every claim of the records in the folders RECORD.

    It needs no network and no accelerator, and runs a record's source only with --relower. Exits with 0 if all records
    are good, else with 1.

    Options:
        explain: Print what a check demands, why, and what to do; then stop.
        replay: Also check V601 to V609 on two runs (=all: on every run), with the record's programs in a sandbox.
        relower: Also check V610: whether the record's source, in a sandbox, makes its programs.
        nonce: With --replay: seed of the draws. Default: random.
        checkpoints: With --replay: checkpoints of one run. Without them, a run is trained again in full.
    """
    if explain is not None:
        return _explain(explain)
    if replay and Path("all") in records and not Path("all").exists():
        raise UsageError("--replay all; write --replay=all")
    if not records:
        raise UsageError("no record given; name the folder that holds its source.txt")
    reports = {str(need_record(record)): checked(record, strict=strict) for record in records}
    if replay or relower:
        from speedrun.record.examine.replay import Options, checked_nonce, examined, relowered

        options = Options(replay or "some", checked_nonce(nonce), checkpoints, data, unsafe)
        echo = sys.stderr if ctx.params["as_json"] else sys.stdout
        for asked, judge in ((replay, examined), (relower, relowered)):
            if asked:
                reports = {path: judge(Path(path), one, options, echo) for path, one in reports.items()}
    exit_code = max(report.exit_code for report in reports.values())
    facts = {path: _facts(report) for path, report in reports.items()}
    lines: list[str] = []
    for path, report in reports.items():
        lines += [clean(path)] if len(reports) > 1 else []
        lines += _lines(report, verbose=verbose)
    several = AllValidated(exit_code=exit_code, records=facts)
    return cli.Answer(several if len(facts) > 1 else facts.popitem()[1], lines, exit_code)


def _explain(id: str) -> cli.Answer[Explained]:
    check = find_check(id)
    told = Explained(id=check.id, severity=check.severity, title=check.title, why=check.why, fix=check.hint)
    lines = [f"{check.id}  {check.title} ({check.severity})", f"why   {check.why}", f"fix   {check.hint}"]
    return cli.Answer(told, lines)


def _facts(report: Report) -> Validated:
    found = [Checked(id=one.check.id, status=one.status, messages=one.messages) for one in report.results]
    return Validated(exit_code=report.exit_code, results=found)


def _lines(report: Report, *, verbose: bool) -> Iterator[str]:
    for result in report.shown(verbose=verbose):
        status = click.style(f"{result.status:<8}", fg=_COLOURS[result.status])
        fix = [f"fix: {result.check.hint}"] if result.status in ("failed", "warning") else []
        lines = [f"{status} {result.check.id}  rule: {result.check.title}", *result.messages, *fix]
        yield f"\n{' ' * 15}".join(lines)
    yield report.verdict + ("" if verbose else " (-v shows all)")


_RECORD = "runs/first"
_NUM_PAIRS = 3

_MEANING: dict[Verdict, str] = {
    "within": "loss and time agree with the record's as far as {runs} can tell",
    "faster": "the loss agrees with the record's, and the time is significantly shorter",
    "slower": "the loss agrees with the record's, but the time is significantly longer",
    "loss mismatch": "the loss differs significantly from the record's, so its time says nothing",
    "not the same hardware": "the loss agrees with the record's as far as {runs} can tell; the times do not compare",
}
_NOISE: dict[NoiseFrom, str] = {
    "runs": "noise of the record's runs",
    "track": "noise that the track declares",
    "assumed": "noise assumed: the record has too few runs",
}


@cli.command(
    f"speedrun reproduce {_RECORD} --runs 1",
    f"speedrun reproduce {_RECORD} --same-seeds --runs 1",
    f"speedrun reproduce {_RECORD} --against runs/mine",
)
def reproduce(
    record: Path,
    *,
    runs: Annotated[
        cli.Count | None,
        f"Number of runs. Default: as many as the record has; with --against {_NUM_PAIRS} of each.",
    ] = None,
    candidate: Annotated[Path | None, "--against RECORD"] = None,
    same_seeds: Annotated[bool, "Use the record's seeds, to compare bits. Default: fresh ones."] = False,
    by: Annotated[str, "--by NAME", "Your name, for reproduction.json."] = "",
    data: cli.Data = None,
    out: Annotated[Path | None, "--out DIR"] = None,
    into_record: Annotated[bool, "Also put reproduction.json into the record."] = False,
    unsafe: cli.Unsafe = False,
) -> cli.Answer[Judgement | Compared]:
    """Run RECORD again from its own source, and judge whether its result holds. EXECUTES CODE FROM THE RECORD.

    First compares data, packages and lock of the record with this machine, and prints what each difference means. The
    verdict is within, faster, slower, loss mismatch or not the same hardware. Exits with 0 for within and faster, else
    with 1; with 2 or 3, before anything runs, if the record or the data cannot be used.

    With --against, exits with 0 if the candidate is faster and its loss is not worse within the noise, else with 1.

    Options:
        candidate: Run this record in turns with RECORD, with the same fresh seeds, and report which is faster.
        out: Folder of runs and reproduction.json; the same command continues there. Default: below runs/.
    """
    # NumPy comes with it.
    from speedrun.record.examine import reproduce as again

    if candidate is not None and (same_seeds or into_record or runs == 1):
        raise UsageError("--against takes 2 runs or more with fresh seeds; leave the other options out")
    found = load_result(record)
    folder = out or Path("runs") / f"reproduction-{found.id[:12]}{'-same-seeds' * same_seeds}"
    pair = [(record, folder), *([(candidate, folder / "candidate")] if candidate is not None else [])]
    sides = [again.Repetition(*one, data, sys.stderr, unsafe=unsafe) for one in pair]
    if candidate is not None:
        _check_alike(*(side.record for side in sides))
    for side in sides:
        click.echo("\n".join(_differences(side.points)), err=True)
    click.echo(protections(unsafe=unsafe), err=True)
    num_runs = runs or (len(found.finished) if candidate is None else _NUM_PAIRS)
    plan = again.planned(folder, [side.record for side in sides], num_runs, same_seeds=same_seeds)
    with lock_folder(folder, refuse=UsageError):
        ran = again.run_in_turns(sides, plan.seeds, sys.stderr)
        results = [side.judge(plan, ended, by) for side, ended in zip(sides, ran, strict=True)]
    wrote = [folder / REPRODUCTION]
    if into_record:
        wrote.append(record / REPRODUCTION)
        write_whole(record / REPRODUCTION, encode(results[0].reproduction))
    if candidate is None:
        good = results[0].judgement.verdict in ("within", "faster")
        answer = cli.Answer(results[0].judgement, _table(results[0]), int(not good))
    else:
        answer = _compared(results, folder)
    return answer._replace(lines=[*answer.lines, *(f"wrote    {clean(str(path))}" for path in wrote)])


def _compared(results: "Sequence[Result]", folder: Path) -> cli.Answer[Compared]:
    """Write `comparison.json`, and return the answer about a record and its candidate."""
    record, candidate = ({run.start.seed: run for run in result.runs if run.finished} for result in results)
    pairs = {seed: (record[seed], candidate[seed]) for seed in record if seed in candidate}
    try:
        found = compared("candidate", "record", pairs)
    except ValueError as error:  # numbers that no honest run has
        raise SpeedrunError(f"the runs cannot be compared: {error}; 'speedrun validate' them") from None
    if found.log_time is None or found.loss is None or found.together_s is None:
        raise SpeedrunError(f"got {len(found.seeds)} finished pairs; need two; 'speedrun validate' the runs")
    write_whole(folder / "comparison.json", encode(found))
    loss, times = found.loss, found.log_time
    mean, low, high = (math.expm1(x) for x in (times.mean, times.low, times.high))
    change = f"{mean:+.2%} of its time, 95 % between {low:+.2%} and {high:+.2%}"
    verdict = "not resolvable here"
    if high < 0 or low > 0:
        verdict = "the candidate is faster" if mean < 0 else "the candidate is slower"
    lines = [
        *(line for result in results for line in _table(result)),
        f"change   {change}: {verdict}",
        f"loss     {loss.mean:+.5f} nats, 95 % between {loss.low:+.5f} and {loss.high:+.5f}",
        f"both     {found.together_s.mean:+.2f} s: with the loss counted as time, at {found.s_per_nat:.1f} s a nat",
        f"rate     {RATE_FROM}",
    ]
    facts = Compared(record=results[0].judgement, candidate=results[1].judgement, comparison=found)
    return cli.Answer(facts, lines, int(not (high < 0 and loss.low <= 0)))


def _check_alike(*records: Record) -> None:
    """Raise UsageError for records of different tracks or hardware."""
    machines = [(one.rules.id, one.reference_run.preflight) for one in records]
    ran_on = [f"{id} on {here.num_devices} devices ({clean(here.platform)})" for id, here in machines]
    if len(set(ran_on)) > 1:
        found = f"{' and '.join(ran_on)} do not compare"
        raise UsageError(f"{found}; need the same for both; choose other records")


def _differences(points: Sequence[Point]) -> list[str]:
    """Return a line for all equal points, and one for each difference."""
    same = ", ".join(clean(point.what) for point in points if point.equal)
    lines = [f"same     {same}"] if same else []
    for point in points:
        if not point.equal:
            both = f"{point.what}: the record has {point.recorded}, here is {point.here}"
            lines.append(f"differs  {clean(both)}; no longer promised: {clean(point.lost)}")
    return lines


def _table(result: "Result") -> list[str]:
    """Return the lines of a result."""
    record, runs, found, judgement = result
    number = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    seeds = "the record's seeds" if found.same_seeds else "fresh seeds"
    hardware = f"{found.runs[0].hardware.num_devices} x {clean(found.runs[0].hardware.device_kind)}"
    lines = [
        f"again    {found.track}, {number} with {seeds} on {hardware}",
        *_differences((*found.points, *judgement.hardware)),
        *_numbers(result),
    ]
    if found.same_seeds:
        lines.append(
            f"bits     {judgement.num_same_bits} of {number} ended in exactly the state of the record's run of that "
            f"seed; {_equal_losses(record, runs)}"
        )
    return [*lines, f"verdict  {judgement.verdict}: {_MEANING[judgement.verdict].format(runs=number)}"]


def _equal_losses(record: Record, runs: Sequence[Run]) -> str:
    """Return the number of step losses that equal those of the same seed to the last bit."""
    recorded = {run.start.seed: run.steps for run in record.finished}
    sides = [(recorded[run.start.seed], run.steps) for run in runs]
    pairs = [(old.loss, new.loss) for side in sides for old, new in zip(*side, strict=False)]
    num_losses = sum(len(steps) for steps, _ in sides)
    largest = max((abs(old - new) for old, new in pairs), default=0.0)
    num_equal = sum(old == new for old, new in pairs)
    return f"{num_equal} of {num_losses} losses are equal, the largest difference is {largest:.3g}"


def _numbers(result: "Result") -> list[str]:
    """Return loss and time of both sides, from finite runs."""
    record, runs, found, judgement = result
    done = [run for run in runs if run.finished]
    blown = [f"loss     {len(runs) - len(done)} of {len(runs)} runs became non-finite"]
    lines = blown if len(done) < len(runs) else []
    loss, time = judgement.loss_difference, judgement.time_ratio
    if loss is None or time is None:
        return lines
    seeds = {run.start.seed for run in runs}
    counterparts = [run for run in record.finished if run.start.seed in seeds or not found.same_seeds]
    losses = [fmean(run.val_loss for run in side) for side in (done, counterparts)]
    times_s = [fmean(run.train_time_s for run in side) for side in (done, record.finished)]
    return [
        *lines,
        f"loss     {losses[0]:.5f}, record {losses[1]:.5f} | {loss.mean:+.5f} nats, "
        f"{CONFIDENCE:.0%} between {loss.low:+.5f} and {loss.high:+.5f} ({_NOISE[loss.noise_from]})",
        f"time     {times_s[0]:.2f} s, record {times_s[1]:.2f} s | {time.mean - 1:+.1%}, "
        f"{CONFIDENCE:.0%} between {time.low - 1:+.1%} and {time.high - 1:+.1%} ({_NOISE[time.noise_from]})",
    ]
