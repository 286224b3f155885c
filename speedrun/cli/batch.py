"""`speedrun batch`: several runs, declared before the first one, in one record."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from speedrun.base import children
from speedrun.base import track as tracks
from speedrun.base.errors import UsageError
from speedrun.board.wandb_relay import relayed
from speedrun.cli import options as cli
from speedrun.cli.card import card
from speedrun.cli.run_options import config_options, ghost_option, new_folder, request_of, wandb_option
from speedrun.data import generated
from speedrun.lab.run_batch import Batch, Outcome, Promise, num_runs
from speedrun.record.validate import validate


@cli.new_command(
    "speedrun batch --track smoke-cpu --runs 6",
    "speedrun batch --track main-8xh100 --expect 3.278 --title 'record 21 in JAX'",
    "speedrun batch --resume runs/2026-11-21-smoke-cpu-1",
)
@config_options
@cli.settings_option
@cli.option("--runs N", cli.Integer(2), "How many.")
@cli.option("--then N", cli.Integer(3), "Total, if the first look proves nothing.")
@cli.option("--expect LOSS", cli.Number(0), "Expected mean loss, for as many runs as prove it 9 of 10 times.")
@cli.option("--seeds N,N,...", str, "Choose them. Default: derived from source and config.")
@cli.option("--title TEXT", str, "What the record is, in a few words.")
@cli.option("--resume DIR", cli.PATH, "Resume a declared batch.")
@ghost_option
@wandb_option
@click.pass_context
def command(ctx: click.Context, *, resume: Path | None, **given: Any) -> cli.Answer:
    """Declare a batch, run it, and test its mean loss. The record holds all runs, also failed ones.

    Exits with 0 if the batch proves its target and every check passes, with 1 if not.
    """
    ctx.with_resource(children.stoppable())
    if resume is None:
        folder = given["out"] or new_folder(given["track"])
        promise = _promise(given, folder)
        generated.ensure(tracks.load(given["track"]), given["data"], partial(click.echo, err=True))
        if code := children.run_module("speedrun.lab.declare", promise):
            ctx.exit(children.shell_code(code))
    else:
        cli.only_with_resume(ctx, "data", "title", "ghost", "wandb")
        folder = resume
    with relayed(folder, given["wandb"]):
        as_json, chosen = ctx.params["as_json"], {name: given[name] for name in ("data", "title", "ghost")}
        batch = Batch(folder, **chosen, say=partial(click.echo, err=as_json), to_stderr=as_json)
        return _answer(folder, batch.run())


def _promise(given: dict[str, Any], folder: Path) -> Promise:
    """Return the batch that the options say."""
    rules, then, expect = tracks.load(given["track"]), given["then"], given["expect"]
    num_looks = 1 if then is None else 2
    text = given["seeds"] or ""
    try:
        seeds = tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise UsageError(f"--seeds {text!r}; need whole numbers with commas between them") from None
    return Promise(
        config=request_of(given, cli.parse_settings(given["settings"]), folder),
        num_runs=given["runs"] or num_runs(rules, expect, num_looks=num_looks),
        then=then,
        seeds=seeds,
        expected_loss=expect,
    )


def _answer(folder: Path, done: Outcome) -> cli.Answer:
    """Validate the record."""
    report = validate(folder)
    facts = {"record": str(folder), "summary": done.summary}
    facts["failed_checks"] = {r.check.id: r.messages for r in report.having("failed")}
    lines = [card(done.rules, done.summary, report), f"record  {folder}"]
    for picture in done.plots[-1:]:  # the PNG
        lines += [f"plot    {picture}", f"next    {shlex.join(['speedrun', 'stats', str(folder)])}"]
    return cli.Answer(facts, lines, 0 if done.standing.passed and report.exit_code == 0 else 1)
