"""Options of commands that train, and the requests that they make: to run, to declare, or to price."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import click

from speedrun.base.budget import Budget
from speedrun.base.errors import UsageError
from speedrun.cli import options as cli
from speedrun.cli.options import Amount, Answer, Attention, Count, Data, Integer, Recipe, Settings, Track
from speedrun.commands import added

if TYPE_CHECKING:
    from speedrun.train.run_config import RunConfig

Priced = Annotated[Any, "budget"]  #: what that function of another room answers


class RunOptions(NamedTuple):
    """Options of a run.

    Options:
        recipe: Recipe to train: a name, or your own file, path/to/mine.py. Default: the track's.
        num_devices: Number of devices. Default: the track's, or all.
        microbatches: Parts of a step's batch. Default: 8, or one for each device if there are more.
        out: New folder. Default: below runs/, with date, track and a number.
    """

    track: Track = "smoke-cpu"
    recipe: Recipe | None = None
    num_devices: Annotated[Count | None, "--devices N"] = None
    attention: Attention = "auto"
    microbatches: Count | None = None
    data: Data = None
    out: Annotated[Path | None, "--out DIR"] = None
    settings: Settings = cli.UNCHANGED

    def request(self, out: Path, **more: Any) -> "RunConfig":
        """Return the request for such a run."""
        from speedrun.train.run_config import RunConfig

        same = {name: value for name, value in self._asdict().items() if name not in ("out", "settings")}
        return RunConfig(**same, out=out, overrides=dict(self.settings), **more)


class Size(NamedTuple):
    """The number of runs of a batch, and their seeds.

    Options:
        runs: Number of runs. Default: what proves the target 9 of 10 times, by --expect or the recipe's own claim.
        then: Total number, if the first (interim) look proves nothing.
        expect: Expected mean loss; declares enough runs to prove it 9 of 10 times.
    """

    runs: Annotated[int | None, Integer(2)] = None
    then: Annotated[int | None, Integer(3)] = None
    expect: Annotated[Amount | None, "--expect LOSS"] = None


class DryRun(NamedTuple):
    """Options that price what would be declared, and limit it.

    Options:
        dry_run: Declare and run nothing; print time, cost, disk space and the chance of a proof.
        kind: Price it on such GPUs. Default: the track's, or h100.
        dollars: Price of one of its devices for an hour.
        budget: Start nothing that is planned to take more, and end what does, as SIGTERM would; earlier runs count.
    """

    dry_run: bool = False
    kind: Annotated[str | None, "--device-kind KIND"] = None
    dollars: Amount | None = None
    budget: Annotated[str | None, "--budget 20m|$5|1e15flop"] = None

    def is_asked(self) -> bool:
        """Whether to price only; raise UsageError for what says how, if nothing is priced, and for no budget."""
        if self.budget is not None:
            Budget.parse(self.budget)  # "$5" in double quotes is nothing to a shell
        if not self.dry_run and self.budget is None and (self.kind, self.dollars) != (None, None):
            raise UsageError(
                "--device-kind and --dollars price; add --dry-run or --budget, or leave them out"
            )
        return self.dry_run

    def limited(self, asked: Any) -> Any:
        """Return the request with the price of its budget, if it has one; raise UsageError if its plan exceeds that."""
        import msgspec

        budget = asked.budget and str(added("afford")(asked, self.kind, self.dollars)[0])
        return msgspec.structs.replace(asked, budget=budget)

    def answer(self, ctx: click.Context, asked: Any) -> Answer[Any]:
        """Price a request; refuse to price what is begun."""
        if ctx.params["resume"] is not None:
            raise UsageError("--dry-run prices what would begin; leave out --resume")
        self.limited(asked)
        found = added("budget")(asked, self.kind, dollars=self.dollars, say=partial(click.echo, err=True))
        return Answer(found, found.lines(), error=found.error)


def begun(ctx: click.Context, dry: DryRun, module: str, asked: Callable[[], Any], *allowed: str) -> Path:
    """Return the folder of several runs: that of `--resume`, or a new one that a child process declares.

    The child runs `module` with the request. `allowed` are the options that go with `--resume`.
    """
    if ctx.params["resume"] is not None:
        cli.only_with_resume(ctx, "budget", *allowed)
        return ctx.params["resume"]
    from speedrun.base import subprocesses, track
    from speedrun.data import generated  # NumPy comes with it

    request = dry.limited(asked())
    config = request.config
    generated.ensure(track.load(config.track), config.data, partial(click.echo, err=True))
    if code := subprocesses.run_module(module, request):
        raise SystemExit(subprocesses.shell_code(code))
    return config.out
