"""The numbers of a record, derived from its logs, and its texts for people: `about.json`, the head of `README.md`."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from speedrun.base import console, track
from speedrun.base.atomic_files import lock_record, write_whole
from speedrun.base.errors import UsageError
from speedrun.base.recipe_files import is_shipped
from speedrun.record.batch import batch_status
from speedrun.record.layout import ABOUT, Strict
from speedrun.record.logged_run import Run
from speedrun.record.reader import MOST_ABOUT_BYTES, Record, discard_partials, encode, load
from speedrun.record.statistics import MeanTest, sd

HEAD_END = "<!-- end of the generated head; write below -->\n"


class Summary(Strict, frozen=True, omit_defaults=True):
    """Numbers of a record. Means are over finished runs; losses are nats per token."""

    num_runs: int
    num_finished: int
    crashed: tuple[str, ...]  #: where and why each unfinished run crashed
    target_loss: float
    target_reached: bool
    val_loss_mean: float | None
    val_loss_sd: float | None
    train_time_s_mean: float | None
    train_time_s_sd: float | None
    cold_wall_s_mean: float | None
    num_steps: int
    num_tokens: int
    step_p50_ms: float
    held_gap: float | None = None  #: mean loss of held-out text above `val_loss_mean`; None without such text
    held_gap_half_width: float | None = None  #: of its 95 % interval, over sequences
    test: MeanTest | None = None  #: None without a declared batch, or before its first look


def summarize(record: Record) -> Summary:
    """Derive the summary from the logs; the track must be known."""
    runs, done, target, declared = record.runs, record.finished, record.rules.target, record.declaration
    losses, times_s = [run.val_loss for run in done], [run.train_time_s for run in done]
    val_loss = record.mean_loss if done else None
    gaps = [found for run in done if (found := run.held_gap)]
    none_blew_up = all(run.outcome != "non-finite" for run in runs)
    return Summary(
        num_runs=len(runs),
        num_finished=len(done),
        crashed=tuple(run.crashed for run in runs if not run.finished),
        target_loss=target.loss,
        target_reached=none_blew_up and val_loss is not None and val_loss <= target.loss,
        val_loss_mean=val_loss,
        val_loss_sd=sd(losses),
        train_time_s_mean=fmean(times_s) if done else None,
        train_time_s_sd=sd(times_s),
        cold_wall_s_mean=fmean(run.end.cold_wall_s for run in done) if done else None,
        num_steps=max((run.origin.step + len(run.steps) for run in done), default=0),
        num_tokens=max((at.tokens_seen for run in done for at in (run.origin, *run.steps[-1:])), default=0),
        step_p50_ms=console.quantiles_ms([second for run in done for second in run.step_s])[0],
        held_gap=fmean(gap for gap, _ in gaps) if gaps else None,
        # All runs have one scored text in common, so more runs hardly lower this error.
        held_gap_half_width=1.96 * fmean(error for _, error in gaps) if gaps else None,
        test=declared and batch_status(declared, runs, target.loss, target.sigma).test,
    )


def assemble(
    record_dir: Path,
    *,
    title: str | None = None,
    default_title: str = "untitled",
    authors: Sequence[str] | None = None,
    parent_record: str | None = None,
    changes: Sequence[str] | None = None,
) -> Summary:
    """Write `about.json` and the head of `README.md` for the runs in a folder, and keep the text below the head.

    None keeps a field of `about.json`. Raise UsageError if a file is malformed or not permitted.
    """
    said = {"title": title, "authors": authors, "parent_record": parent_record, "changes": changes}
    edits = {key: value for key, value in said.items() if value is not None}
    with lock_record(record_dir):
        discard_partials(record_dir)
        record = load(record_dir)
        for path, why in record.refused.items():
            raise UsageError(f"{record_dir / path}: {why}; take it out of the record")
        for problem in record.malformed:
            raise UsageError(f"{record_dir}: {problem}; 'speedrun validate' lists all problems")
        if ABOUT not in record.raw:
            edits = {"title": default_title, **edits}
        # The track of the runs may be unknown here: what follows from the runs needs its target.
        rules = record.track or track.version(record.reference_run.start.track)
        record = dataclasses.replace(record, about=replace(record.about, **edits), track=rules)
        if (size := len(about := encode(record.about))) > MOST_ABOUT_BYTES:
            most = f"a record holds at most {MOST_ABOUT_BYTES:,}"
            raise UsageError(f"{size:,} bytes in about.json; {most}; say it in fewer words")
        own = record.raw.get("README.md", b"").rpartition(HEAD_END.encode())[2]
        write_whole(record_dir / ABOUT, about)
        summary = summarize(record)
        write_whole(record_dir / "README.md", readme_head(record, summary).encode(), own)
        return summary


def reproduce_command(run: Run) -> str:
    """Return the command line that repeats this run."""
    name, (num_devices, _) = run.start.track.rpartition("@")[0], run.hardware
    if not is_shipped(run.start.recipe):
        return "speedrun reproduce RECORD --same-seeds"  # it takes the recipe from the record's source
    command = ["speedrun", "run", "--track", name, "--recipe", run.start.recipe]
    command += ["--seed", str(run.start.seed)]
    known = track.load(name) if name in track.files() else None
    # A run that was killed before its preflight has no devices.
    if known and num_devices not in (0, known.rules.num_devices):
        command += ["--devices", str(num_devices)]
    if known and known.synthetic is None:
        command += ["--data", "DIR"]
    for key, value in run.start.overrides.items():
        command += ["--set", f"{key}={value}"]
    return shlex.join(command)


def sources(runs: Sequence[Run]) -> list[str]:
    """Return the given weights from which runs of a record started, if any."""
    own = {run.folder for run in runs}
    return sorted({run.origin.run_id for run in runs if run.resumed} - own)


def facts(record: Record, summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of a result card, as names and untrusted texts."""
    about, lead, declared = record.about, record.reference_run, record.declaration
    # The config is untrusted.
    recipe = lead.start.config.get("recipe")
    parent = recipe.get("parent") if isinstance(recipe, dict) else None
    parent = f"recipe {parent}" if isinstance(parent, str) else "none"
    declared = f"{len(declared.seeds)} declared" if declared else f"{len(record.runs)}"
    broken = summary.num_runs - summary.num_finished
    declared += f"; {broken} did not finish" * bool(broken)
    rows = [
        ("track", lead.start.track),
        ("recipe", f"{lead.start.recipe}, revision {lead.start.recipe_revision}"),
        ("validation loss", _spread(summary.val_loss_mean, summary.val_loss_sd, "nats per token", digits=4)),
        ("target", f"{summary.target_loss:g}, {'reached' if summary.target_reached else 'not reached'}"),
        ("train time", _spread(summary.train_time_s_mean, summary.train_time_s_sd, "s", digits=2)),
        ("total wall time", _spread(summary.cold_wall_s_mean, None, "s", digits=1)),
        ("runs", f"{summary.num_finished} finished of {declared}"),
        ("steps", f"{summary.num_steps:,} of {summary.step_p50_ms:.1f} ms (median)"),
        ("tokens", f"{summary.num_tokens:,}"),
        ("hardware", "{} x {}".format(*lead.hardware) if lead.hardware[0] else "not known"),
        ("source", f"{record.source_lines:,} lines, sha256 {record.source_sha256[:16]}"),
        ("authors", ", ".join(about.authors) or "not named"),
        ("parent", about.parent_record or parent),
    ]
    if held := held_out_loss(summary):
        rows.insert(4, ("held-out loss", held))
    if begun_from := sources(record.runs):
        rows.append(("started from", f"{', '.join(begun_from)}: given weights, not random ones"))
    measured = ("validation loss", "target", "train time", "total wall time", "steps", "tokens")
    return [row for row in rows if summary.num_finished or row[0] not in measured]


def held_out_loss(summary: Summary) -> str:
    """Return the mean loss of held-out text, and by how much it is above the result; "" if there is none."""
    if summary.held_gap is None or summary.val_loss_mean is None:
        return ""
    mean, more = summary.val_loss_mean + summary.held_gap, summary.held_gap
    return f"{mean:.4f} ({more:+.4f} ± {summary.held_gap_half_width:.4f}) nats per token"


def readme_head(record: Record, summary: Summary) -> str:
    """Return the generated part of `README.md`."""
    rows = (f"| {name} | {_cell(value)} |" for name, value in facts(record, summary))
    blocks = [
        f"# {_cell(record.about.title)}",
        "" if summary.num_finished else "**No run finished, so this record holds no result.**",
        "\n".join(f"- {_cell(said)}" for said in summary.crashed),
        "\n".join(["| | |", "|---|---|", *rows]),
        "\n".join(f"- {_cell(change)}" for change in record.about.changes),
        "![loss against train time](plots/loss.png)" if summary.num_finished else "",
        f"Run it again:\n\n    {console.clean(reproduce_command(record.runs[0]))}",
        HEAD_END,
    ]
    return "\n\n".join(block for block in blocks if block)


def _spread(mean: float | None, sd: float | None, unit: str, *, digits: int) -> str:
    if mean is None:
        return "none"
    return f"{mean:.{digits}f}{f' (sd {sd:.{digits}f})' if sd is not None else ''} {unit}"


def _cell(text: str) -> str:
    """Escape text so that it can neither leave a table cell nor hold markup."""
    shown = console.clean(text)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("[", "&#91;")
