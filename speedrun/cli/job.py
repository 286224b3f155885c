"""Turns the options of `speedrun launch` into a job."""

import importlib
from typing import Any

import click

from speedrun.cli.options import parse_settings
from speedrun.ground import devices as kinds
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError
from speedrun.ground.plugins import own_file
from speedrun.launch import request
from speedrun.launch.job import Job, clock_time

#: Options that launch passes to `run` and `batch` itself.
_TAKEN = ("track", "data", "out", "runs", "resume", "local_processes", "coordinator", "processes", "process")


def job_of(
    on: str,
    *,
    track: str,
    runs: int | None,
    nodes: int | None,
    gpus_per_node: int | None,
    limit: str | None,
    words: tuple[str, ...],
    hosts: str | None,
    **others: Any,
) -> tuple[Job, list[str]]:
    """Return the job that the options of `speedrun launch --on` describe, and notes for its user.

    Args are named as the options are; `words` stand after `--`, `others` are fields of `Job`, None if left out.

    Raises:
        UsageError: for options that cannot be used.
    """
    rules = tracks.load(track)
    kinds.load(others["gpu"])
    host_names = tuple(filter(None, (hosts or "").split(",")))
    num_nodes, gpus = nodes or len(host_names) or 1, gpus_per_node
    if gpus is None:
        gpus = rules.rules.num_devices if rules.rules.platform == "gpu" else 0
    request.check(on, rules, runs, num_nodes, gpus, host_names, others)
    folders = request.places(on, track, others)
    time_s = None if limit is None else request.seconds(limit)
    given = _parsed(runs, num_nodes, gpus, words)
    words += request.recipe_words(given["recipe"], others["image"])
    # JAX is imported only now, so that the errors above appear at once.
    from speedrun.science import recipes
    from speedrun.study import budget

    recipe = recipes.load(given["recipe"] or rules.recipe).override(parse_settings(given["settings"]))
    devices, microbatches = num_nodes * gpus, given["microbatches"]
    if gpus:
        budget.check_division(recipe, given.get("replicas") or num_nodes, devices, microbatches)
    base = ["speedrun", "run" if runs is None else "batch", "--track", track]
    base += [] if runs is None else ["--runs", str(runs)]
    base += ["--devices", str(devices)] if devices not in (0, rules.rules.num_devices) else []
    notes = []
    if time_s is None:
        time_s, reason = budget.time_limit(rules, recipe, gpus, others["gpu"], microbatches or 8, runs or 1)
        notes = [f"{clock_time(time_s)} at most: {reason}; --time sets another"]
    if own := own_file(given["recipe"]):
        notes.append(f"{own} is read at this path on each node; put it there")
    job = Job(
        track=rules,
        nodes=num_nodes,
        gpus=gpus,
        words=(*base, *words),
        time_s=time_s,
        hosts=host_names,
        **folders,
    )
    unranked = request.ranking_note(job, runs)
    return job, [unranked, *notes] if unranked else notes


def _parsed(runs: int | None, nodes: int, gpus: int, words: tuple[str, ...]) -> dict[str, Any]:
    """Parse the words with the command that will get them, so that an error appears now and not after the queue."""
    name = "run" if runs is None else "batch"
    command = importlib.import_module(f"speedrun.cli.{name}").command
    with command.make_context(f"speedrun {name}", list(words)) as ctx:
        for param in command.params:
            is_given = ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
            if is_given and (param.name in _TAKEN or (param.name == "devices" and gpus)):
                option = "--gpus-per-node" if param.name == "devices" else f"--{param.name.replace('_', '-')}"
                raise UsageError(
                    f"{param.opts[0]} is given after --, but launch sets it; use its own {option}"
                )
        if nodes > 1 and ctx.params.get("checkpoint_every"):
            raise UsageError("--checkpoint-every on several nodes, which share no disk; need --nodes 1")
        return ctx.params
