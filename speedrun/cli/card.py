"""The result of a run in a few lines, and the next command."""

import shlex
from typing import TYPE_CHECKING

from speedrun.base import track as tracks
from speedrun.base.recipe_files import own_file
from speedrun.record.summary import Summary
from speedrun.record.validate import Report, Status

if TYPE_CHECKING:
    from speedrun.train.request import RunConfig


def card(rules: tracks.Track, summary: Summary, report: Report) -> str:
    """Return the result in three lines, and a line for each check that failed or warned."""
    reached = "reached" if summary.target_reached else "NOT reached"
    words: dict[Status, str] = {"failed": "failed", "warning": "warned", "skipped": "not asked"}
    others = [(word, report.having(status)) for status, word in words.items() if report.having(status)]
    checks = [f"{len(report.having('ok'))} checks passed"]
    checks += [f", {len(results)} {word}" for word, results in others]
    checks += [
        f"\n        {r.check.id} {word}: {'; '.join(r.messages)}"
        for word, rs in others
        for r in rs
        if r.status != "skipped"
    ]
    head = f"card    {rules.id}: target {rules.target.loss:g} {reached}"
    if summary.num_finished:
        head += (
            f", val {summary.val_loss_mean:.4f} in {summary.train_time_s_mean:.2f} s of training\n"
            f"        {summary.num_steps:,} steps, {summary.num_tokens:,} tokens, "
            f"cold wall {summary.cold_wall_s_mean:.1f} s | {_standing(rules.rules, summary)}"
        )
    else:
        head += ", no run finished"
    return f"{head}\nchecks  {''.join(checks)}"


def _standing(rules: tracks.Rules, summary: Summary) -> str:
    """Return what the result is worth on the track."""
    if not rules.ranked:
        return "shown, not ranked"
    if summary.test is None or summary.num_finished < rules.min_runs:
        return f"{summary.num_finished} run{'s' * (summary.num_finished > 1)}; a rank takes a batch of {rules.min_runs}"
    return "qualified" if summary.test.passed else "not proven"


def following(config: "RunConfig", summary: Summary, report: Report) -> str:
    """Return the most useful next command: explain a failed check, reproduce a success, or try another seed."""
    data = ["--data", str(config.data)] if config.data else []
    if failed := report.having("failed"):
        words = ["validate", "--explain", failed[0].check.id]
    elif summary.target_reached:
        words = ["reproduce", str(config.out), "--same-seeds", *data]
    else:
        words = ["run", "--track", config.track, *_chosen(config), *data, "--seed", str(config.seed + 1)]
    return shlex.join(["speedrun", *words])


def _chosen(config: "RunConfig") -> list[str]:
    """Return the options of a run besides track, data and seed."""
    options = {
        "--recipe": own_file(config.recipe) or config.recipe,
        "--devices": config.num_devices,
        "--replicas": config.replicas,
        "--microbatches": config.microbatches,
        "--attention": None if config.attention == "auto" else config.attention,
    }
    words = [word for name, value in options.items() if value for word in (name, str(value))]
    return words + [word for setting in config.overrides.items() for word in ("--set", "=".join(setting))]
