"""The commands that show or publish: `plot`, `import-log`, `describe`, `submit`, `leaderboard` and `export`."""

import importlib
import os
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import click
from msgspec.structs import replace

from speedrun.base.atomic_files import write_whole
from speedrun.base.console import clean
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.base.subprocesses import say
from speedrun.board import exports, foreign_logs, plots, submission
from speedrun.board.foreign_logs import Context, Group, Noise
from speedrun.board.leaderboard import BOARD, Board, markdown, read
from speedrun.board.leaks import Leak
from speedrun.cli import options as cli
from speedrun.cli.schema import Failure
from speedrun.record.reader import encode, load, need_record
from speedrun.record.summary import assemble
from speedrun.record.validate import examine

Plots = TypedDict("Plots", {"plots": list[str]})
Imported = TypedDict(
    "Imported",
    {"files": tuple[Context, ...], "num_chosen": int, "groups": tuple[Group, ...], "noise": Noise | None},
)
Described = TypedDict("Described", {"record": str})
Stale = TypedDict("Stale", {"stale": list[str]})
Exported = TypedDict("Exported", {"files": list[str]})


@cli.command("speedrun plot records/smoke-cpu/2026-11-29-first", "speedrun plot runs/first --kind all")
def plot(
    records: Annotated[tuple[Path, ...], "RECORD..."],
    *,
    kind: Literal[plots.Kind, "all"] = "loss",
) -> cli.Answer[Plots]:
    """Draw records as PNG, into RECORD/plots.

    Options:
        kind: Loss against train time, loss against tokens, a histogram of step times, or all three.
    """
    kinds: list[plots.Kind] = [known for known in plots.KINDS if kind in (known, "all")]
    paths = [str(path) for record in records for path in plots.plot(record, kinds)]
    return cli.Answer({"plots": paths}, paths)


_MOST_SHOWN = 5  #: problems of a file


@cli.command(
    "speedrun import-log logs/*.txt --json",
    "speedrun import-log runs.csv --match track_1_short/2026",
)
def import_log(
    files: Annotated[tuple[Path, ...], "FILE..."],
    *,
    match: Annotated[tuple[str, ...], "Only runs with TEXT in their name."] = (),
) -> cli.Answer[Imported]:
    """Read the logs of other people's runs, and show how much equal runs differ.

    A FILE is a text log of modded-nanogpt, of its port to JAX or of llm.c, or a CSV with the columns
    log,step,num_steps,val_loss,train_time_ms. Runs of one folder that end at the same step form a group; a copy of a
    run counts once. Imported runs have no seed and no hashes, and are never ranked. Nothing in a FILE is executed.
    """
    names = foreign_logs.names(files)
    contexts = tuple(foreign_logs.import_file(path, name) for path, name in zip(files, names, strict=True))
    runs = (run for one in contexts for run in one.runs)
    named = (run for run in runs if not match or any(text in run.name for text in match))
    chosen = foreign_logs.distinct(named)
    if match and not chosen:
        raise UsageError(f"no run has {' or '.join(match)} in its name; choose with another --match")
    groups = tuple(foreign_logs.groups(chosen))
    spread = foreign_logs.noise(groups)
    facts = Imported(files=contexts, num_chosen=len(chosen), groups=groups, noise=spread)
    lines = list[str]()
    for one in contexts:
        lines.append(f"file    {one.source}: {len(one.runs):,} runs, {len(one.problems):,} problems")
        lines += [f"        line {each.line}: {each.message}" for each in one.problems[:_MOST_SHOWN]]
    lines += map(_of_group, groups)
    if spread is not None:
        lines.append(
            f"noise   sd {spread.pooled_sd:.5f} (95 %: {spread.low:.5f} to {spread.high:.5f}), pooled over "
            f"{spread.num_groups} groups with {spread.num_runs:,} of {len(chosen):,} runs"
        )
    return cli.Answer(facts, lines)


def _of_group(group: Group) -> str:
    steps = f"{group.step}/{group.num_steps}" if group.num_steps else f"{group.step}"
    sd = "none" if group.sd is None else f"{group.sd:.4f}"
    step = "" if group.step_ms is None else f"  step {group.step_ms:.2f} ms"
    where = clean(group.folder) or "no folder"
    return f"group   {where}  {steps}  n {len(group.losses)}  mean {group.mean:.4f}  sd {sd}{step}"


@cli.command(
    "speedrun describe RECORD --title 'smoke in 200 steps' --author ada --change 'twenty steps fewer'",
    "speedrun describe RECORD --parent records/smoke-cpu/2026-11-29-first",
)
def describe(
    record: Path,
    *,
    title: Annotated[str | None, "Title of the record."] = None,
    authors: Annotated[tuple[str, ...], "--author NAME", "Name or handle of an author."] = (),
    changes: Annotated[tuple[str, ...], "--change TEXT", "A change from the parent, in one sentence."] = (),
    parent: Annotated[Path | None, "--parent RECORD", "The record that it builds on."] = None,
) -> cli.Answer[Described]:
    """Write title, authors, changes and parent of RECORD into its about.json and the head of its README.

    Other fields stay as they are. The README below its head is yours to write.
    """
    need_record(record)
    if parent is not None and not (parent / "source.txt").is_file():
        raise UsageError(f"{parent} is not a record; give --parent a folder that holds source.txt")
    if parent is not None and parent.resolve() == record.resolve():
        raise UsageError(f"{parent} is the record itself; give --parent the record that it builds on")
    if not (parent or title or authors or changes):
        raise UsageError("nothing to change; give --title, --author, --change or --parent")
    place = None if parent is None else "/".join(parent.resolve().parts[-2:])
    assemble(
        record, title=title or None, authors=authors or None, changes=changes or None, parent_record=place
    )
    return cli.Answer({"record": str(record)}, [f"record  {record}"])


class LeaksFound(Failure, frozen=True, kw_only=True):
    """A record that seems to hold secrets."""

    findings: tuple[Leak, ...]


@cli.command("speedrun submit runs/first --dry-run", "speedrun submit runs/first --name wider-head")
def submit(
    record: Path,
    *,
    out: Annotated[Path | None, "--out DIR"] = None,
    name: Annotated[str | None, "--name WORDS"] = None,
    dry_run: Annotated[bool, "Print everything and write nothing."] = False,
    missed: Annotated[bool, "Submit a record that missed its target."] = False,
) -> cli.Answer[submission.Submission | LeaksFound]:
    """Validate RECORD strictly, scan it for secrets, pack it, and write the text of its pull request.

    Prints the commands that send it, and runs none of them; type them in the root of a checkout. Exits with 1 and
    writes nothing if a check fails or warns, the record missed its target without --missed, or a file seems to hold a
    secret.

    Options:
        out: Output folder. Default: the folder that holds the record.
        name: Words for the folder's name. Default: the title.
    """
    need_record(record)
    loaded = load(record)
    report = examine(loaded, strict=True)
    submission.require_acceptable(loaded, report, missed=missed)
    out = Path(os.path.relpath(record.resolve().parent)) if out is None else out
    submission.require_outside(record, out)
    ready, archive = submission.prepare(loaded, report, name=submission.name_of(loaded, name), out=out)
    found = [_line(finding) for finding in ready.findings]
    if secrets := sum(finding.secret for finding in ready.findings):
        # A log cannot be edited, so the secret itself must be revoked.
        error = (
            f"{record} seems to hold secrets ({secrets}), so nothing was written; revoke them where they were issued, "
            "then remove them from what people wrote, or run again without them"
        )
        return cli.Answer(LeaksFound(error, 1, "failed", findings=ready.findings), found, error=error)
    if not dry_run:
        submission.write(ready, archive)
    done = "  (not written)" if dry_run else ""
    lines = [
        f"checks  {report.verdict}; no secrets found",
        *found,
        f"archive {ready.archive}  {ready.archive_bytes:,} bytes, sha256 {ready.archive_sha256}{done}",
        f"text    {ready.text_path}{done}",
        f"\nTo send it, type in the root of a checkout{', after it is written' * dry_run}:\n",
        *(f"    {line}" for line in ready.commands),
        "\nOr open the pull request in a browser with that text. Then tick the promises that you make.",
    ]
    return cli.Answer(replace(ready, written=not dry_run), lines)


def _line(finding: Leak) -> str:
    """Return file, line and kind, never the secret."""
    status = "secret " if finding.secret else "warning"
    return f"{status} {clean(finding.path)}:{finding.line}  {clean(finding.kind)}"


_Records = Annotated[Path, "--records DIR", "Folder of <track>/<record>/."]
_HEAD = (
    "# The board, or leaderboard\n\n± gives the 95 % interval of a mean. What others published or claim is in italics: "
    "unranked, not verified by us. `validate --replay` reads programs for GPUs for half a year after their date. "
    "Memory is what text in the constants of a program could be worth; V607 bounds it for each track.\n\n"
)


@click.group(epilog=cli.epilog("speedrun leaderboard build", "speedrun leaderboard check"))
def leaderboard() -> None:
    """Build the board from records, or check that it is up to date."""


@cli.command(
    "speedrun leaderboard build",
    "speedrun leaderboard build --records DIR --json",
    of=leaderboard,
    silent=True,
)
def build(*, records: _Records = Path("records")) -> cli.Answer[Board]:
    """Validate every record again and write LEADERBOARD.md and leaderboard.json.

    They go into the folder of records. A record that cannot be judged is left out, with a warning and exit code 1.
    """
    board = read(records)
    for path, content in _files(board, records).items():
        write_whole(path, content)
    rows = [f"{row.track:<16} {row.rank or '':>3} {row.status:<12} {row.path}" for row in board.rows]
    for one in board.left_out:
        say(f"left out {one.path}: {one.why}")
    error = f"{len(board.left_out)} records cannot be judged and are not on the board; 'speedrun validate' says why"
    rows.append(f"board   {records / 'LEADERBOARD.md'}")
    return cli.Answer(board, rows, error=error if board.left_out else None)


@cli.command("speedrun leaderboard check", of=leaderboard, silent=True)
def check(*, records: _Records = Path("records")) -> cli.Answer[Stale]:
    """Exit with 1 if the board is out of date."""
    files = _files(read(records), records).items()
    stale = [path for path, content in files if not path.is_file() or path.read_bytes() != content]
    if stale:
        raise SpeedrunError(f"{', '.join(map(str, stale))}: out of date; run 'speedrun leaderboard build'")
    return cli.Answer({"stale": []}, ["board   up to date"])


def _files(board: Board, records: Path) -> dict[Path, bytes]:
    """Return the content of every generated file."""
    return {records / "LEADERBOARD.md": f"{_HEAD}{markdown(board)}".encode(), records / BOARD: encode(board)}


#: Forms of a trained model: modules with `write(trained, out)`, which returns the files that it wrote.
MODEL_FORMS = {
    "safetensors": "speedrun.model.exported",
    "transformers": "speedrun.model.transformers_gpt2",
    "web": "speedrun.model.page_folder",
}


@cli.command(
    "speedrun export records/smoke-cpu/2026-11-29-first --to csv",
    "speedrun export runs/docs --to safetensors --out docs-model",
    "speedrun export runs/docs --to web --out docs-web",
    silent=True,
)
def export(
    record: Path,
    weights: cli.Weights,
    *,
    form: Annotated[
        str,
        "--to",
        click.Choice([*exports.FORMS, *MODEL_FORMS]),
        f"The format: {', '.join(exports.FORMS)} of the curves; {', '.join(MODEL_FORMS)} of the model.",
    ],
    out: Annotated[Path | None, "--out DIR", "New folder. Default: RECORD's name and the format."] = None,
) -> cli.Answer[Exported]:
    """Write the curves of RECORD as text logs or CSV, or its model.

    A model needs the weights of a run with --checkpoint-every. The files contain nothing about this machine.
    """
    folder = out or Path(f"{record.resolve().name}-{form}")
    folder = folder if folder.name else folder.resolve()
    if form in MODEL_FORMS:
        from speedrun.model import weight_sources

        trained = weight_sources.load(record, **weights._asdict())
        submission.require_outside(trained.run[0] if trained.run else record, folder)
        paths = importlib.import_module(MODEL_FORMS[form]).write(trained, folder)
    else:
        for name, value in weights._asdict().items():
            if value is not None:
                raise UsageError(f"--{name} has no effect on curves; leave it out, or choose a model's form")
        paths = exports.export(load(record), form, folder)
    names = [str(path) for path in paths]
    return cli.Answer({"files": names}, names)
