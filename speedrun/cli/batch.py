"""`speedrun batch`: several runs that are promised before the first one, and the record that they make together.

This process holds no device: the declaration and every run are processes of their own, one after the other.
"""

import math
import shlex
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NoReturn

import click
import msgspec

from speedrun.board.record_plot import plot
from speedrun.cli.card import card
from speedrun.cli.child import alone, as_shell, ended
from speedrun.cli.options import (
    Integer,
    Number,
    attention_option,
    data_option,
    devices_option,
    example,
    json_option,
    microbatches_option,
    only_with_resume,
    parse_settings,
    recipe_option,
    settings_option,
    track_option,
)
from speedrun.cli.race import find, ghost_option
from speedrun.cli.relay import relayed, wandb_option
from speedrun.cli.run import new_folder
from speedrun.data import generated
from speedrun.ground import signals
from speedrun.ground import track as tracks
from speedrun.ground.errors import NonFiniteError, UsageError, meaning
from speedrun.ledger import format, runfile, statistics
from speedrun.ledger.assemble import assemble
from speedrun.ledger.batch import Standing, standing
from speedrun.ledger.record import load
from speedrun.ledger.salvage import salvage
from speedrun.ledger.validate import validate

_POWER = 0.9


@click.command(
    epilog=example(
        "speedrun batch --track smoke-cpu --runs 6",
        "speedrun batch --track main-8xh100 --expect 3.278 --title 'record 21 in JAX'",
        "speedrun batch --resume runs/2026-11-21-smoke-cpu-1",
    )
)
@track_option()
@recipe_option
@click.option("--runs", type=Integer(2), metavar="N", help="How many.")
@click.option("--then", type=Integer(3), metavar="N", help="In all, if the first look proves nothing yet.")
@click.option(
    "--expect",
    type=Number(0),
    metavar="LOSS",
    help="The mean you expect; the number of runs follows from it.",
)
@click.option(
    "--power",
    type=Number(0.5, 0.999),
    default=_POWER,
    show_default=True,
    help="With --expect: how probably the batch shall pass.",
)
@click.option(
    "--sigma",
    type=Number(0, min_open=True),
    help="With --expect: sd of losses. Default: the track's.",
)
@click.option("--seeds", metavar="N,N,...", help="Choose them. Default: they follow from source and config.")
@settings_option
@devices_option
@attention_option
@microbatches_option
@data_option
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="A new folder.")
@click.option("--title", help="What the record is, in a few words.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Go on with a declared batch.")
@ghost_option
@wandb_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    track: str,
    recipe: str | None,
    runs: int | None,
    then: int | None,
    expect: float | None,
    power: float,
    sigma: float | None,
    seeds: str | None,
    settings: tuple[str, ...],
    devices: int | None,
    attention: str,
    microbatches: int | None,
    data: Path | None,
    out: Path | None,
    title: str | None,
    resume: Path | None,
    ghost: str | None,
    wandb: str | None,
    as_json: bool,
) -> None:
    """Declare a batch, run it, test its mean loss; one record of all runs, also of those that failed.

    Exits with 0 if the batch proves its target and every check passes, with 1 if not.
    """
    ctx.with_resource(signals.heeded())
    if resume is None:
        rules = tracks.load(track)
        config = {
            "track": track,
            "out": str(out or new_folder(track)),
            "recipe": recipe,
            "overrides": parse_settings(settings),
            "data": None if data is None else str(data),
            "num_devices": devices,
            "microbatches": microbatches,
            "attention": attention,
        }
        promise = {
            "config": config,
            "num_runs": runs or _size(rules, expect, power, sigma, num_looks=1 if then is None else 2),
            "then": then,
            "seeds": _seeds(seeds),
            "expected_loss": expect,
        }
        generated.ensure(rules, data, partial(click.echo, err=True))
        _child(ctx, "speedrun.study.declare", promise, to_stderr=as_json)
        folder = Path(config["out"])
    else:
        only_with_resume(ctx, "data", "title", "ghost", "wandb")
        folder = resume
    with relayed(folder, wandb):
        Batch(ctx, folder, data, title, ghost, as_json=as_json).run()


def _size(
    rules: tracks.Track, expect: float | None, power: float, sigma: float | None, *, num_looks: int = 1
) -> int:
    """The number of runs that prove an expected mean with the wanted probability at the first look."""
    sigma, target = sigma or rules.target.sigma, rules.target.loss
    if expect is None:
        raise UsageError("how many runs? say --runs N, or --expect LOSS and let the number follow from it")
    if sigma is None:
        raise UsageError(f"the noise of {rules.id} is not known; add --sigma, the sd of losses over seeds")
    need = statistics.batch_needed(
        target - expect, sigma, known_sigma=rules.target.sigma, power_wanted=power, num_looks=num_looks
    )
    if need is None:
        raise UsageError(
            f"got a mean of {expect} with sd {sigma}; {statistics.MOST_RUNS:,} runs would not show that it is below "
            f"{target}; need a lower mean"
        )
    return max(need, rules.rules.min_runs, 2)


def _seeds(text: str | None) -> list[int]:
    try:
        return [int(word) for word in (text or "").split(",") if word]
    except ValueError:
        raise UsageError(f"--seeds {text!r}; need whole numbers with commas between them") from None


def _child(ctx: click.Context, module: str, request: dict[str, Any], *, to_stderr: bool) -> None:
    """Runs a module of ours on a request; ends this process as that one ended, if badly."""
    if code := ended(module, request, to_stderr=to_stderr):
        ctx.exit(as_shell(code))


class Batch:
    """One declared batch on its way."""

    def __init__(
        self,
        ctx: click.Context,
        folder: Path,
        data: Path | None,
        title: str | None,
        ghost: str | None,
        *,
        as_json: bool,
    ) -> None:
        raw = _read(folder)
        self._ctx, self._folder, self._data, self._as_json = ctx, folder, data, as_json
        self._promise = _decoded(raw, folder)
        self._sha256 = runfile.sha256(raw)
        self._rules = tracks.load(self._promise.track.id.rpartition("@")[0])
        self._title = title or f"{self._promise.recipe.name} on {self._promise.track.id}"
        rival = find(ghost, self._rules.id)  # once for all runs: what is wrong with it is told once
        self._ghost = "none" if rival is None else str(rival.record)

    def run(self) -> None:
        """Runs what is missing, tells how far it is after each run, and ends with the card."""
        with alone(self._folder / runfile.BATCH) as lock:
            far = self._far()
            while far.missing:
                request = self._request(far.missing[0])
                code = ended("speedrun.cli.race", request, to_stderr=self._as_json, keep_open=(lock,))
                far = self._far()
                if code and code != NonFiniteError.exit_code:
                    self._stop(code)
            self._finish(far)

    def _far(self) -> Standing:
        """Puts the record in order, and says how far it is."""
        for run_id in salvage(self._folder, self._promise.recipe, self._promise.num_devices):
            click.echo(
                f"warning: {run_id} was killed; its log is kept, as that of a run that broke off", err=True
            )
        if list(self._folder.glob("runs/*")):
            assemble(self._folder, title=self._title)
        target = self._rules.target
        far = standing(self._promise, load(self._folder).runs, target.loss, target.sigma)
        self._say(far)
        return far

    def _request(self, seed: int) -> dict[str, Any]:
        """A run as declared, and what it races: a `race.Request`."""
        promise = self._promise
        config = {
            "track": self._rules.name,
            "out": str(self._folder),
            "recipe": promise.recipe.name,
            "seed": seed,
            "overrides": promise.recipe.overrides,
            "data": None if self._data is None else str(self._data),
            "num_devices": promise.num_devices,
            "microbatches": promise.microbatches,
            "attention": promise.attention,
            "batch_sha256": self._sha256,
        }
        return {"config": config, "ghost": self._ghost, "track": self._rules.id}

    def _say(self, far: Standing) -> None:
        """One line: how many of how many, and what they say so far."""
        total = next(
            (
                look.num_runs
                for look in self._promise.looks
                if look.num_runs >= len(far.losses) + len(far.missing)
            ),
            len(self._promise.seeds),
        )
        parts = [f"batch   {len(far.losses)} of {total} runs"]
        if math.inf in far.losses:
            parts.append("one became non-finite, which fails the batch")
        elif len(far.losses) > 1:
            parts.append(f"mean {fmean(far.losses):.5f}, sd {stdev(far.losses):.5f}")
        if far.test is not None:
            verdict = "proven" if far.test.passed else "not proven"
            parts.append(f"p = {far.test.p:.2g}, need less than {far.test.alpha:g}: {verdict}")
        click.echo(" | ".join(parts), err=self._as_json)

    def _stop(self, code: int) -> NoReturn:
        """A run broke off."""
        again = ["speedrun", "batch", "--resume", str(self._folder)]
        click.echo(
            f"error: a run ended with {meaning(code)}; go on: {shlex.join(again)}",
            err=True,
        )
        self._ctx.exit(as_shell(code))

    def _finish(self, far: Standing) -> None:
        summary = assemble(self._folder, title=self._title)
        pictures = plot(self._folder) if summary.num_finished else []
        report = validate(self._folder)
        if self._as_json:
            facts = {"record": str(self._folder), "summary": summary, "failed_checks": {}}
            facts["failed_checks"] = {r.check.id: r.messages for r in report.having("failed")}
            click.echo(msgspec.json.encode(facts))
        else:
            click.echo(card(self._rules, summary, report))
            click.echo(f"record  {self._folder}")
            for picture in pictures[-1:]:  # the PNG; none of a batch without a result
                following = shlex.join(["speedrun", "stats", str(self._folder)])
                click.echo(f"plot    {picture}\nnext    {following}")
        self._ctx.exit(0 if far.passed and report.exit_code == 0 else 1)


def _read(folder: Path) -> bytes:
    try:
        return (folder / runfile.BATCH).read_bytes()
    except OSError:
        raise UsageError(
            f"{folder} holds no {runfile.BATCH}; declare a batch with 'speedrun batch --runs N'"
        ) from None


def _decoded(raw: bytes, folder: Path) -> format.Declaration:
    try:
        return format.decode(raw, format.Declaration)
    except runfile.FormatError as error:
        raise UsageError(f"{folder / runfile.BATCH}: {error}; restore it, or declare a new batch") from None
