"""What `speedrun ablate` and `speedrun sweep` share: an experiment is designed, run block by block, and told.

This process holds no device: the design and every run are processes of their own, one after the other.
"""

import math
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import click
import msgspec

from speedrun.board.record_plot import plot
from speedrun.cli.child import alone, as_shell, ended
from speedrun.cli.options import Decorator, Integer, data_option, json_option, only_with_resume, track_option
from speedrun.cli.run import new_folder
from speedrun.data import generated
from speedrun.ground import provenance
from speedrun.ground import track as tracks
from speedrun.ground.console import clean, duration
from speedrun.ground.errors import NonFiniteError, SpeedrunError, UsageError, meaning
from speedrun.ground.wholefile import write_whole
from speedrun.ledger import runfile
from speedrun.ledger.assemble import assemble
from speedrun.study import trials as experiments
from speedrun.study.comparison import RATE_FROM
from speedrun.study.effects import LEVEL, NEGLIGIBLE, Effect, Finding, Summary, summary, winner
from speedrun.study.forest import forest
from speedrun.study.trials import EXPERIMENT, Kind, Runs, Trial

_OPTIONS: Sequence[Decorator] = (
    track_option(),
    click.option("--recipe", metavar="NAME", help="What to train. Default: the track's own recipe."),
    click.option("--runs", type=Integer(1), metavar="N", help="Of each arm, all with the same N seeds."),
    click.option(
        "--confirm",
        type=Integer(0),
        metavar="N",
        help="Fresh seeds for the best arm and the one it is compared with. Default: as many as --runs; 0: none.",
    ),
    click.option("--devices", type=Integer(1), metavar="N", help="Default: what the track asks for, or all."),
    click.option("--attention", default="auto", show_default=True, metavar="FORM", help="Its kernels."),
    click.option("--microbatches", type=Integer(1), metavar="N", help="Parts of a step's batch. Default: 8."),
    data_option,
    click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="A new folder."),
    click.option("--resume", type=click.Path(path_type=Path), metavar="DIR", help="Run what is missing."),
    json_option,
)


def options(command: Callable[..., object]) -> Callable[..., object]:
    """The options of every experiment, for `perform`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def perform(
    ctx: click.Context,
    kind: Kind,
    overrides: dict[str, str],
    *,
    features: Sequence[str] = (),
    variants: Sequence[dict[str, str]] = (),
) -> None:
    """Designs an experiment of the command's options, or takes up the one of `--resume`; runs it, and tells it."""
    given = ctx.params
    if given["resume"] is None:
        folder = _designed(ctx, kind, overrides, features, variants)
    else:
        only_with_resume(ctx, "data")
        folder = given["resume"]
    _Performance(ctx, folder).run()


def _designed(
    ctx: click.Context,
    kind: Kind,
    overrides: dict[str, str],
    features: Sequence[str],
    variants: Sequence[dict[str, str]],
) -> Path:
    given = ctx.params
    if given["runs"] is None:
        raise UsageError("how many runs of each arm? say --runs N; two are the least that can tell anything")
    generated.ensure(tracks.load(given["track"]), given["data"], partial(click.echo, err=True))
    folder = given["out"] or new_folder(f"{given['track']}-{ctx.info_name}")
    config = {
        "track": given["track"],
        "out": str(folder),
        "recipe": given["recipe"],
        "overrides": overrides,
        "data": None if given["data"] is None else str(given["data"]),
        "num_devices": given["devices"],
        "microbatches": given["microbatches"],
        "attention": given["attention"],
    }
    request = {
        "config": config,
        "kind": kind,
        "num_runs": given["runs"],
        "num_confirming": given["runs"] if given["confirm"] is None else given["confirm"],
        "features": features,
        "variants": variants,
    }
    if code := ended("speedrun.study.design", request, to_stderr=True):
        ctx.exit(as_shell(code))
    return folder


class _Performance:
    """One experiment on its way."""

    def __init__(self, ctx: click.Context, folder: Path) -> None:
        self._ctx, self._folder, self._data = ctx, folder, ctx.params["data"]
        self._plan = experiments.read(folder)
        self._sha256 = runfile.sha256((folder / EXPERIMENT).read_bytes())
        self._track = self._plan.track.id.rpartition("@")[0]

    def run(self) -> None:
        """Runs what is missing, first to choose by, then to confirm; ends with the table."""
        with alone(self._folder / EXPERIMENT) as lock:
            self._announce()
            self._check_source()
            chosen = [*experiments.trials(self._plan.arms, self._plan.seeds)]
            runs = self._run_missing(chosen, lock)
            found = summary(self._plan, self._sha256, runs)
            if best := winner(found.findings) if self._plan.confirming else None:
                pair = [self._plan.arm(name) for name in (best.against, best.arm)]
                self._say(
                    f"confirm {best.arm!r} against {best.against!r}: {_count(len(self._plan.confirming), 'fresh seed')}"
                )
                runs |= self._run_missing([*experiments.trials(pair, self._plan.confirming)], lock)
                found = summary(self._plan, self._sha256, runs)
            self._finish(found)

    def _announce(self) -> None:
        plan = self._plan
        self._say(
            f"{self._ctx.info_name}  {plan.track.id} | {len(plan.arms)} arms x {_count(len(plan.seeds), 'seed')}, then "
            f"{_count(len(plan.confirming), 'fresh seed')} for the best | {plan.standing} | {self._folder}"
        )
        for said in plan.left_out:
            self._say(f"left out  {said}")

    def _check_source(self) -> None:
        """Before hours of runs that would be another experiment's."""
        rules = [tracks.TRACKS_DIR / f"{self._track}.toml"]
        for recipe, sha256 in sorted({(arm.recipe, arm.source_sha256) for arm in self._plan.arms}):
            source = provenance.closure(
                [f"speedrun.science.recipes.{recipe}", "speedrun.training.train"], rules
            )
            if runfile.sha256(source.encode()) != sha256:
                raise UsageError(
                    f"the source of {recipe} changed since {self._folder} was designed; restore it, or begin anew"
                )

    def _run_missing(self, wanted: Sequence[Trial], lock: int) -> Runs:
        """Runs one after the other what has not come to an end; all that have."""
        runs = experiments.completed(self._folder, self._plan, wanted)
        for number, trial in enumerate(wanted, 1):
            if (trial.arm.name, trial.seed) in runs:
                continue
            left = len(wanted) - len(runs)
            self._say(
                f"run {number} of {len(wanted)}  {trial.arm.name}  seed {trial.seed}  {left} left, {_eta(runs, left)}"
            )
            out = experiments.new_folder(self._folder, self._plan, trial)
            request = {"config": self._request(trial, out), "ghost": "none", "track": self._plan.track.id}
            code = ended("speedrun.cli.race", request, to_stderr=True, keep_open=(lock,))
            runs |= experiments.completed(self._folder, self._plan, [trial])
            run = runs.get((trial.arm.name, trial.seed))
            if run is not None:
                self._assemble(trial, out, drawn=run.finished)
            if run is None or code not in (0, NonFiniteError.exit_code):
                self._stop(code)
        return runs

    def _request(self, trial: Trial, out: Path) -> dict[str, Any]:
        """A `prepare.RunConfig`, as designed."""
        return {
            "track": self._track,
            "out": str(out),
            "recipe": trial.arm.recipe,
            "seed": trial.seed,
            "overrides": trial.arm.overrides,
            "data": None if self._data is None else str(self._data),
            "num_devices": self._plan.num_devices,
            "microbatches": self._plan.microbatches,
            "attention": self._plan.attention,
        }

    def _assemble(self, trial: Trial, out: Path, *, drawn: bool) -> None:
        """Makes the run a record that can be validated, and that says what it is."""
        said = f"One run of the experiment with sha256 {self._sha256[:16]}: {self._plan.standing}."
        assemble(out, title=f"{trial.arm.recipe}, {trial.arm.name}", changes=[said], declared_runs=1)
        if drawn:
            plot(out)

    def _stop(self, code: int) -> NoReturn:
        again = ["speedrun", str(self._ctx.info_name), "--resume", str(self._folder)]
        click.echo(f"error: a run ended with {meaning(code)}; go on: {shlex.join(again)}", err=True)
        self._ctx.exit(as_shell(code) if code else SpeedrunError.exit_code)

    def _finish(self, found: Summary) -> None:
        write_whole(self._folder / "summary.json", experiments.encode(found))
        title = f"{self._plan.arms[-1].recipe} on {self._plan.track.id}: {_TITLES[self._plan.kind]}"
        pictures = [str(path) for path in forest(found, self._folder, title)]
        if self._ctx.params["as_json"]:
            told = {"experiment": str(self._folder), "summary": found, "plots": pictures}
            click.echo(msgspec.json.encode(told))
            return
        for line in (*table(found), *(f"plot    {picture}" for picture in pictures[-1:])):
            click.echo(clean(line))

    def _say(self, line: str) -> None:
        click.echo(clean(line), err=True)


def _eta(runs: Runs, left: int) -> str:
    """For runs that take as long as those before, with their start and compilation."""
    walls_s = [run.end.cold_wall_s for run in runs.values() if run.finished]
    return f"eta {duration(fmean(walls_s) * left)}" if walls_s else "eta unknown before the first run ends"


_TITLES: dict[Kind, str] = {
    "features": "without each feature",
    "ladder": "each recipe against its parent",
    "sweep": "with other settings",
}


def table(found: Summary) -> list[str]:
    """A row an arm, a line on the price of a nat, and what fresh seeds say of the best."""
    head = ("arm", "loss (nats)", "train time", "both (equivalent s)", "p (Holm)", "verdict")
    rows = [head, *(_row(one, found.kind) for one in found.findings)]
    if found.confirmation is not None:
        arm, *rest = _row(found.confirmation, found.kind)
        rows.append((f"{arm}, fresh seeds", *rest))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [*lines, *_price(found), f"best    {_best(found)}", f"note    {found.standing}: {_NOTE}"]


_NOTE = (
    f"paired by seed, 95 % intervals; resolved means Holm's p below {LEVEL:g}; a barnacle is worth less than "
    f"{NEGLIGIBLE:.0%} of the time"
)


def _row(one: Finding, kind: Kind) -> tuple[str, ...]:
    time = one.log_time and tuple(
        100 * math.expm1(x) for x in (one.log_time.mean, one.log_time.low, one.log_time.high)
    )
    return (
        one.arm,
        _interval(one.loss, ".4f"),
        "-" if time is None else f"{time[0]:+.1f} % [{time[1]:+.1f}, {time[2]:+.1f}]",
        _interval(one.together_s, ".2f"),
        "-" if one.together_s is None else f"{one.together_s.adjusted_p:.2g}",
        _verdict(one, kind),
    )


def _interval(effect: Effect | None, digits: str) -> str:
    if effect is None:
        return "-"
    return f"{effect.mean:+{digits}} [{effect.low:+{digits}}, {effect.high:+{digits}}]"


def _verdict(one: Finding, kind: Kind) -> str:
    """What the arm's verdict means: in an ablation the arm is the recipe without something."""
    if one.verdict == "non-finite":
        return f"{_count(one.num_non_finite, 'run')} became non-finite"
    if one.verdict == "unresolved":
        return f"not resolvable with {_count(len(one.seeds), 'seed')}{_alone(one)}"
    if one.verdict == "equal":
        return (
            "barnacle: interval covers zero" if kind == "features" else "no difference: interval covers zero"
        )
    if kind == "features":
        return "worth it" if one.verdict == "worse" else "harmful: better without it"
    return f"{one.verdict} than {one.against!r}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _alone(one: Finding) -> str:
    """What is resolved where both together are not: noise of the node is no noise of the loss."""
    alone = [
        f"{what} alone is: {'better' if effect.mean < 0 else 'worse'}"
        for what, effect in (("loss", one.loss), ("time", one.log_time))
        if effect is not None and effect.adjusted_p < LEVEL
    ]
    return f" ({', '.join(alone)})" if alone else ""


def _price(found: Summary) -> list[str]:
    """What a nat costs, once for each arm that others are compared with."""
    prices = {one.against: one for one in found.findings if one.s_per_nat is not None}
    lines = [f"price   {one.s_per_nat:.1f} s a nat for {name!r}" for name, one in prices.items()]
    return [*lines, f"price   {RATE_FROM}"] if lines else []


def _best(found: Summary) -> str:
    if found.winner is None:
        return "no arm gains anything; nothing to confirm"
    if (fresh := found.confirmation) is None:
        return f"{found.winner}: not confirmed, no fresh seeds were asked for"
    confirmed = "confirmed" if found.confirmed else "NOT confirmed"
    return f"{found.winner}: {confirmed} by {_count(len(fresh.seeds), 'fresh seed')}"
