"""`speedrun reproduce`: a record is run again, and one word says what came of it. Executes code from the record."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import click
import msgspec

from speedrun.cli import docker
from speedrun.cli.options import Integer, data_option, example, json_option, unsafe_option
from speedrun.cli.progress import Progress
from speedrun.ground import children
from speedrun.ground.clock import Stopwatch
from speedrun.ground.console import clean, duration
from speedrun.ground.errors import NonFiniteError, SpeedrunError, UsageError
from speedrun.ground.wholefile import write_whole
from speedrun.ledger import format, reproduction
from speedrun.ledger.format import Manifest
from speedrun.ledger.record import Record
from speedrun.ledger.reproduction import REPRODUCTION, Point, Reproduction, Verdict
from speedrun.ledger.run import Run
from speedrun.referee import circumstances, reproduce
from speedrun.referee.rerun import Rerun
from speedrun.referee.sandbox import protections

_RECORD = "records/smoke-cpu/2026-11-21-six-seeds"

#: What each word means; the first two end with 0, the others with 1.
SAID: dict[Verdict, str] = {
    "within": "the loss is the record's and so is the time, as far as {runs} can tell",
    "faster": "the loss is the record's, and the time is surely shorter than the record's",
    "slower": "the loss is the record's, but the time is surely longer than the record's",
    "loss mismatch": "the loss is surely not the record's, so its time says nothing",
    "not the same hardware": "the loss is the record's as far as {runs} can tell; its time does not compare",
}
_GOOD = ("within", "faster")


@click.command(
    epilog=example(
        f"speedrun reproduce {_RECORD} --runs 1",
        f"speedrun reproduce {_RECORD} --same-seeds --runs 1",
        f"speedrun reproduce {_RECORD} --docker",
    )
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--runs", type=Integer(1), metavar="N", help="How many. Default: as many as the record has.")
@click.option("--same-seeds", is_flag=True, help="Those of the record, to compare bits. Default: fresh ones.")
@click.option("--by", default="", metavar="NAME", help="Who you are; stands in the result.")
@data_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The new runs and reproduction.json. Default: one below runs/. The same command again goes on there.",
)
@click.option("--into-record", is_flag=True, help="Put reproduction.json into the record, too.")
@click.option("--docker", "in_docker", is_flag=True, help="In the container image that the record names.")
@click.option("--image", metavar="NAME", help="With --docker: another image; what differs is told.")
@unsafe_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    record: Path,
    runs: int | None,
    same_seeds: bool,
    by: str,
    data: Path | None,
    out: Path | None,
    into_record: bool,
    in_docker: bool,
    image: str | None,
    unsafe: bool,
    as_json: bool,
) -> None:
    """Run RECORD again from its own source, and say whether it holds. EXECUTES CODE FROM THE RECORD.

    Compares first what the record names (source, track, data, packages, lock, flags) with what is here, and says what
    is no longer promised where they differ. The verdict is within, faster, slower, loss mismatch or not the same
    hardware. Exits with 0 if it is within or faster, with 1 if not; with 2 or 3, before anything is run, if the
    record or the data cannot be used.
    """
    if image is not None and not in_docker:
        raise UsageError("--image names a container image; it needs --docker as well")
    found_record, manifest = circumstances.read(record)
    # Of the content, not the id that the record claims: a path could stand there.
    digest = format.record_id(manifest)[:12]
    folder = out or Path("runs") / f"reproduction-{digest}{'-same-seeds' * same_seeds}"
    if in_docker:
        chosen, shards = docker.image_for(manifest, image), docker.data_for(manifest, data)
        words = docker.inner_words(runs, by, shards, same_seeds=same_seeds, as_json=as_json)
        code = docker.reproduced(chosen, record, folder, shards, words)
    else:
        again = _Again(record, found_record, manifest, folder, data, unsafe=unsafe, as_json=as_json)
        code = again.run(runs, by, same_seeds=same_seeds)
    if into_record and (folder / REPRODUCTION).exists():
        _put_into(record, folder / REPRODUCTION)
    ctx.exit(code)


def _put_into(record: Path, path: Path) -> None:
    """Where a stranger's code ran, anything can lie there, a link to a file of ours among it."""
    try:
        raw = reproduction.encode(reproduction.decode(path.read_bytes()))
    except (OSError, format.FormatError) as error:
        raise UsageError(
            f"{path}: {clean(str(error))}; nothing was put into the record; run again with another --out"
        ) from None
    write_whole(record / REPRODUCTION, raw)
    click.echo(f"wrote {clean(str(record / REPRODUCTION))}", err=True)


class _Again:
    """One reproduction on its way."""

    def __init__(
        self,
        path: Path,
        record: Record,
        manifest: Manifest,
        folder: Path,
        data: Path | None,
        *,
        unsafe: bool,
        as_json: bool,
    ) -> None:
        self._path, self._record, self._manifest = path, record, manifest
        self._folder, self._data, self._as_json = folder, data, as_json
        self._unsafe = unsafe

    def run(self, num_runs: int | None, by: str, *, same_seeds: bool) -> int:
        """Compares, runs what is missing, writes and tells the verdict; the exit code."""
        # Refuses what may not be executed.
        again = Rerun(self._path, self._record.finished[0].file.run_id, unsafe=self._unsafe)
        with Progress("data") as progress:
            data = circumstances.data_point(self._manifest, self._data, progress.update)
        points = (*circumstances.points(self._record, self._manifest), data)
        for line in _compared(points):
            click.echo(line, err=True)
        click.echo(protections(unsafe=self._unsafe), err=True)
        plan = reproduce.planned(self._folder, self._record, self._manifest, num_runs, same_seeds=same_seeds)
        with children.locked(self._folder / reproduce.PLAN):
            runs = self._run_missing(again, plan)
            found = reproduce.judged(self._record, self._manifest, plan, points, runs, by)
            path = reproduce.write(found, self._folder)
        if self._as_json:
            click.echo(msgspec.json.encode(found))
        else:
            for line in table(found, self._record):
                click.echo(line)
            click.echo(f"wrote    {clean(str(path))}")
        return 0 if found.verdict in _GOOD else 1

    def _run_missing(self, again: Rerun, plan: reproduce.Plan) -> list[Run]:
        """Runs what has not come to an end; all that have, in the order of the seeds."""
        done, watch, num_new = reproduce.ended(self._folder, plan, self._manifest), Stopwatch(), 0
        for number, seed in enumerate(plan.seeds, 1):
            if seed in done:
                continue
            left = len(plan.seeds) - len(done)
            eta_s = left * (watch.seconds / num_new if num_new else self._expected_s)
            click.echo(f"run {number} of {len(plan.seeds)}  seed {seed}  eta {duration(eta_s)}", err=True)
            self._one(again, seed)
            done, num_new = reproduce.ended(self._folder, plan, self._manifest), num_new + 1
            if seed not in done:
                raise SpeedrunError(f"the run with seed {seed} left no log that can be read; see above")
        return [done[seed] for seed in plan.seeds]

    @property
    def _expected_s(self) -> float:
        """Of a run that takes as long as the record's."""
        return fmean(run.end.cold_wall_s for run in self._record.finished)

    def _one(self, again: Rerun, seed: int) -> None:
        """One run. That it became non-finite is an answer; whatever else ends it is told, with how to go on."""
        out = reproduce.next_folder(self._folder, seed)
        try:
            again.run(out, seed=seed, data=self._data, echo=sys.stderr)
        except SpeedrunError as error:
            if error.exit_code == NonFiniteError.exit_code:
                return
            told = SpeedrunError(f"{error}; the same command again goes on in {self._folder}")
            told.exit_code = error.exit_code
            raise told from None


def _compared(points: Sequence[Point]) -> list[str]:
    """What is the same on one line, what differs each on its own."""
    same = ", ".join(clean(point.what) for point in points if point.equal)
    lines = [f"same     {same}"] if same else []
    for point in points:
        if not point.equal:
            told = f"{point.what}: the record has {point.recorded}, here is {point.here}"
            lines.append(f"differs  {clean(told)}; no longer promised: {clean(point.lost)}")
    return lines


def table(found: Reproduction, record: Record) -> list[str]:
    """What was compared, both numbers with their intervals, the bits, and the verdict in a sentence."""
    runs = f"{len(found.runs)} run{'s' * (len(found.runs) != 1)}"
    seeds = "the record's seeds" if found.same_seeds else "fresh seeds"
    hardware = f"{found.hardware.num_devices} x {clean(found.hardware.device_kind)}"
    lines = [f"again    {found.track}, {runs} with {seeds} on {hardware}", *_compared(found.points)]
    lines += _numbers(found, record)
    if found.num_same_bits is not None:
        lines.append(
            f"bits     {found.num_same_bits} of {runs} ended in the very state of the record's run of that seed"
        )
    said = SAID[found.verdict].format(runs=runs)
    return [*lines, f"verdict  {found.verdict}: {said}"]


def _numbers(found: Reproduction, record: Record) -> list[str]:
    """Loss and time of both sides; what became non-finite has neither."""
    losses = [run.val_loss for run in found.runs if run.val_loss is not None]
    times_s = [run.train_time_s for run in found.runs if run.train_time_s is not None]
    blown = len(found.runs) - len(losses)
    lines = [f"loss     {blown} of {len(found.runs)} runs became non-finite"] if blown else []
    loss, time = found.loss_difference, found.time_ratio
    if loss is None or time is None:
        return lines
    seeds = {run.seed for run in found.runs}
    counterparts = [run for run in record.finished if run.file.seed in seeds or not found.same_seeds]
    their_loss = fmean(run.val_loss for run in counterparts)
    their_s = fmean(run.train_time_s for run in record.finished)
    return [
        *lines,
        f"loss     {fmean(losses):.5f}, record {their_loss:.5f} | {loss.mean:+.5f} nats, "
        f"{found.confidence:.0%} between {loss.low:+.5f} and {loss.high:+.5f} ({_NOISE[loss.noise_from]})",
        f"time     {fmean(times_s):.2f} s, record {their_s:.2f} s | {time.mean - 1:+.1%}, "
        f"{found.confidence:.0%} between {time.low - 1:+.1%} and {time.high - 1:+.1%} ({_NOISE[time.noise_from]})",
    ]


_NOISE: dict[reproduction.NoiseFrom, str] = {
    "runs": "noise of the record's runs",
    "track": "noise that the track knows",
    "assumed": "noise assumed: the record has too few runs",
}
