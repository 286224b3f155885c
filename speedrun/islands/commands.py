"""The commands `speedrun islands`: training that loses a machine and goes on."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

import click
from msgspec.structs import replace

from speedrun.base import runlog, subprocesses
from speedrun.base import track as tracks
from speedrun.base.console import memory
from speedrun.base.errors import UsageError
from speedrun.cli import options as cli
from speedrun.cli import requests
from speedrun.cli.train import Trained, told
from speedrun.record.logged_run import Run, rounds_of
from speedrun.record.reader import load_result
from speedrun.train.resume_settings import asked

Replayed = TypedDict("Replayed", {"record": str, "answers": int, "differ": list[str]})


@click.group(epilog=cli.epilog("speedrun islands run", "speedrun islands replay runs/first"))
def islands() -> None:
    """Train on islands: meshes that exchange weights every few steps, and may join, leave or die."""


class Fleet(NamedTuple):
    """Options of a fleet.

    Options:
        every: Steps of a round. Default: the track's.
        quorum: Islands whose answers make a round count. Default: the track's.
        outer_lr: Learning rate of the outer step; 1 without momentum takes the mean.
        max_rise: Refuse weights that score worse than those sent and than the median, by more than so many nats.
        meet_within: Time for islands to start.
    """

    islands: Annotated[cli.Count, "Number of islands."] = 3
    every: cli.Count | None = None
    quorum: cli.Count | None = None
    outer_lr: Annotated[float, cli.Number(0.0001, 100)] = 1.0
    outer_momentum: Annotated[float, cli.Number(0, 0.9999), "Nesterov momentum of the outer step."] = 0.0
    deadline: Annotated[cli.Count, "--deadline SECONDS", "Time for the answers of a round."] = 120
    max_rise: Annotated[float, cli.Number(0.0001)] = 0.15
    meet_within: Annotated[cli.Count, "--meet-within SECONDS"] = 600

    def settings(self, track: str) -> runlog.Islands:
        """Return the settings that the log names; raise UsageError if the track does not permit them."""
        rules = tracks.load(track)
        if (own := rules.meshes) is None:
            raise UsageError(f"{rules.id} is for one mesh; choose another track, such as islands-cpu")
        every, quorum = self.every or own["every"], self.quorum or min(own["quorum"], self.islands)
        if not quorum <= self.islands <= own["most"]:
            got = f"{self.islands} islands of which {quorum} must answer"
            raise UsageError(f"{got}; {rules.id} takes at most {own['most']}; pass other numbers")
        if rules.rules.val_every % every:
            got = f"--every {every}, but {rules.id} validates every {rules.rules.val_every} steps"
            raise UsageError(f"{got}; need a divisor of that")
        outer = self.outer_lr, self.outer_momentum, self.max_rise
        return runlog.Islands(self.islands, every, quorum, float(self.deadline), *outer)


@cli.command(
    "speedrun islands run",
    "speedrun islands run --islands 4 --every 10 --outer-lr 0.7 --outer-momentum 0.5",
    "speedrun islands run --resume runs/2026-11-26-islands-cpu-1",
    of=islands,
)
def run(
    ctx: click.Context,
    options: requests.RunOptions,
    fleet: Fleet,
    *,
    seed: Annotated[cli.Natural, "Seed of the initial weights."] = 0,
    address: Annotated[str | None, "--address HOST:PORT"] = None,
    resume: Annotated[Path | None, "--resume DIR", "Resume the run in DIR from its snapshot."] = None,
) -> cli.Answer[Trained] | None:
    """Train on islands, and write, draw and validate a record. An island that is lost is replaced.

    Exits with 0 if the target is reached and every check passes, else with 1.

    Options:
        address: Ray to use; $RAY_AUTH_TOKEN has its token. Default: one of our own, on this machine.
    """
    ctx.with_resource(subprocesses.stoppable())
    from speedrun.islands import child, snapshot
    from speedrun.train import single_run

    if resume is None:
        settings = fleet.settings(options.track)
        folder = options.out or cli.new_folder(options.track)
        config = options.request(folder, seed=seed, meshes=fleet.islands)
    else:
        cli.only_with_resume(ctx, "address", "meet_within")
        config = snapshot.resumed(resume)
        settings = snapshot.load(resume).settings if config.resume else fleet.settings(config.track)
    limits_s = {"start": fleet.meet_within + 300.0, "step": fleet.meet_within + settings.deadline_s + 300.0}
    config = replace(config, deadlines_s=limits_s)
    asked = replace(config, resume=resume is not None)
    job = child.Job(asked, meet_s=fleet.meet_within, settings=settings, address=address)
    beside = single_run.Extras(stream=sys.stderr if ctx.params["as_json"] else None)
    done = single_run.run(job, beside, resumed=lambda *_, **__: config, module=child.__name__)
    return None if done is None else told(done, _line(load_result(config.out).runs))


next(param for param in run.params if param.name == "track").default = "islands-cpu"


def _line(runs: Sequence[Run]) -> str:
    """Return what the islands of a record did."""
    rounds = [one for run in runs for one in run.of(runlog.Round)]
    works = [work for one in rounds for work in one.works]
    losses = sum(bool(one.why) for run in runs for one in run.of(runlog.Island))
    used = sum(work.num_tokens for work in works if not work.refused)
    return (
        f"islands {len(rounds)} rounds, {losses} islands left or were late, "
        f"{sum(bool(work.refused) for work in works)} answers refused\n"
        f"        {used:,} distinct tokens of {sum(work.num_tokens for work in works):,} in all, "
        f"{memory(sum(one.num_bytes for one in rounds))} exchanged"
    )


@cli.command("speedrun islands replay runs/2026-11-26-islands-cpu-1", of=islands)
def replay(ctx: click.Context, record: Path, *, data: cli.Data = None) -> cli.Answer[Replayed]:
    """Train again as the log of RECORD says, in turns in this process, and compare every digest. Needs no Ray.

    Exits with 0 if all weights and states are equal to the last bit, else with 1. Other machines may round differently.
    """
    found = load_result(record)
    if not (settings := found.reference_run.of(runlog.Islands)):
        raise UsageError(f"{record} has no islands; type: speedrun validate --replay {record}")
    ctx.with_resource(subprocesses.stoppable())
    from speedrun.islands.island import Island, weights_of
    from speedrun.islands.replay import in_turns, repeated

    request = asked(found.reference_run, Path(f"{record}.replay"), data)
    island = Island("", replace(request, meshes=settings[0].islands))
    differ, num_works, again = list[str](), 0, in_turns(island, settings[0].every)
    for one in repeated(settings[0], rounds_of(found.runs), weights_of(island.fresh()), again):
        num_works += len(one.works)
        differ += [f"round {one.round.version}: {said}" for said in one.differs]
        said = f"round {one.round.version}: {len(one.works)} answers, {len(one.differs)} differences"
        click.echo(said, err=True)
    facts = Replayed(record=str(record), answers=num_works, differ=differ)
    lines = [*differ, f"replay   {num_works} answers repeated, {len(differ)} differences"]
    return cli.Answer(facts, lines, int(bool(differ)))
