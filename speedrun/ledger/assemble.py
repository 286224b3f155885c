"""From runs to a record: `manifest.json`, `summary.json` and the head of `README.md`.

All three follow from the runs and from what its authors wrote in the manifest, so `assemble` is idempotent. The
validator derives them again.
"""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from speedrun.ground import console, lock, runlog, track
from speedrun.ground.errors import UsageError
from speedrun.ground.track import Track
from speedrun.ground.wholefile import write_whole
from speedrun.ledger import format, runfile
from speedrun.ledger.batch import standing
from speedrun.ledger.format import (
    About,
    Batch,
    Declaration,
    FileRef,
    FormatError,
    Hardware,
    Manifest,
    RunOutcome,
    Source,
    SourceFile,
    Summary,
    TrackRef,
)
from speedrun.ledger.record import discard_partials, read_files, render_logs, run_folders
from speedrun.ledger.run import Run, read_json, read_run
from speedrun.ledger.runfile import Recipe
from speedrun.ledger.source import split_source

HEAD_END = "<!-- end of the generated head; write below -->\n"


def assemble(
    record_dir: Path,
    *,
    title: str | None = None,
    default_title: str = "untitled",
    authors: Sequence[str] | None = None,
    parent_record: str | None = None,
    changes: Sequence[str] | None = None,
    declared_runs: int | None = None,
) -> Summary:
    """Write `manifest.json`, `summary.json` and the head of `README.md` from the runs in the folder.

    Args:
        record_dir: holds `source.txt` and `runs/`.
        title: of the record; for this and the next three, None keeps what the manifest says.
        default_title: the title of a record without a manifest.
        authors: name or handle each.
        parent_record: the record this one is compared with.
        changes: from the parent, one sentence each.
        declared_runs: number of runs declared before the first; by default the number of runs.

    Raises:
        UsageError: if a run cannot be read, or the folder holds what a record may not.
    """
    about = {"title": title, "authors": authors, "parent_record": parent_record, "changes": changes}
    with lock.lock_record(record_dir):
        edits = {key: value for key, value in about.items() if value is not None}
        return _assemble(record_dir, default_title, edits, declared_runs)


def _assemble(
    record_dir: Path, default_title: str, edits: dict[str, Any], declared_runs: int | None
) -> Summary:
    discard_partials(record_dir)
    render_logs(record_dir)
    raw, refused = read_files(record_dir)
    for path, why in refused.items():
        raise UsageError(f"{record_dir / path}: {why}; take it out of the record")
    try:
        runs = [read_run(raw, folder) for folder in run_folders(raw)]
        source = derive_source(raw)
        # A manifest without an end was torn by an older version; it is written again.
        whole = raw.get("manifest.json", b"").endswith(b"\n}\n")
        old = read_json(raw, "manifest.json", Manifest) if whole else None
        promised = read_json(raw, runfile.BATCH, Declaration) if runfile.BATCH in raw else None
    except FormatError as error:
        raise UsageError(f"{record_dir}: {error}; 'speedrun validate' lists all problems") from None
    if not runs:
        raise UsageError(f"{record_dir} holds no runs; 'speedrun run' writes them")
    about = replace(old.about if old else About(title=default_title), **edits)
    if promised is not None:
        declared_runs = len(promised.seeds)
    declared_runs = declared_runs or (old.batch.declared_runs if old else len(runs))
    manifest = derive_manifest(runs, about, declared_runs, source, derive_files(raw))
    summary = derive_summary(runs, track.load(manifest.track.id.rpartition("@")[0]), promised)
    write_whole(record_dir / "manifest.json", runfile.encode(manifest))
    write_whole(record_dir / "summary.json", runfile.encode(summary))
    own = raw.get("README.md", b"").rpartition(HEAD_END.encode())[2]
    write_whole(record_dir / "README.md", readme_head(manifest, summary, runs).encode(), own)
    return summary


def derive_manifest(
    runs: Sequence[Run], about: About, declared_runs: int, source: Source, files: dict[str, FileRef]
) -> Manifest:
    """Derive the manifest. Facts in which runs agree are those of the first finished run by name, if there is one."""
    lead = next((run for run in runs if run.finished), runs[0])
    first = lead.file
    manifest = Manifest(
        record_id="",
        about=about,
        created_utc=min(run.file.created_utc for run in runs),
        track=TrackRef(id=first.track, sha256=first.track_sha256),
        recipe=Recipe(name=first.recipe, revision=first.recipe_revision, overrides=first.overrides),
        source=source,
        config=lead.start.config,
        config_sha256=first.config_sha256,
        data=first.data,
        hardware=Hardware(
            platform=first.platform,
            device_kind=first.device_kind,
            num_devices=first.num_devices,
            matmul_gflops=next((hw.matmul_gflops for hw in lead.of(runlog.Preflight)), 0.0),
        ),
        software=first.software,
        environment=first.environment,
        batch=Batch(
            declared_runs=declared_runs,
            runs=tuple(
                RunOutcome(run_id=run.file.run_id, seed=run.file.seed, outcome=run.file.outcome)
                for run in runs
            ),
        ),
        files=files,
    )
    return replace(manifest, record_id=format.record_id(manifest))


def derive_files(raw: dict[str, bytes]) -> dict[str, FileRef]:
    """Return size and digest of every file that the manifest lists."""
    return {
        path: FileRef(bytes=len(content), sha256=runfile.sha256(content))
        for path, content in sorted(raw.items())
        if path in ("source.txt", runfile.BATCH) or path.startswith("runs/")
    }


def derive_source(raw: dict[str, bytes]) -> Source:
    """Describe the files in `source.txt`.

    Raises:
        FormatError: if it is missing or no source text.
    """
    content = raw.get("source.txt")
    if content is None:
        raise FormatError("source.txt: missing")
    try:
        texts = split_source(content.decode())
    except ValueError as error:
        raise FormatError(f"source.txt: {error}") from None
    files = tuple(
        SourceFile(path=path, sha256=runfile.sha256(text.encode()), lines=text.count("\n"))
        for path, text in texts.items()
    )
    return Source(sha256=runfile.sha256(content), lines=sum(file.lines for file in files), files=files)


def derive_summary(runs: Sequence[Run], rules: Track, promised: Declaration | None) -> Summary:
    """Derive the summary from the logs, with losses from the exact sums."""
    done = [run for run in runs if run.finished]
    val_loss = _mean([run.val_loss for run in done])
    train_time_s = _mean([run.train_time_s for run in done])
    data_wait_s = _mean([run.end.data_wait_s for run in done])
    p50_ms, p95_ms, max_ms = console.quantiles_ms([second for run in done for second in run.step_s])
    none_blew_up = all(run.file.outcome != "non-finite" for run in runs)
    return Summary(
        num_runs=len(runs),
        num_finished=len(done),
        broke_off=tuple(run.broke_off for run in runs if not run.finished),
        target_loss=rules.target.loss,
        target_reached=none_blew_up and val_loss is not None and val_loss <= rules.target.loss,
        val_loss_mean=val_loss,
        val_loss_sd=_sd([run.val_loss for run in done]),
        train_time_s_mean=train_time_s,
        train_time_s_sd=_sd([run.train_time_s for run in done]),
        cold_wall_s_mean=_mean([run.end.cold_wall_s for run in done]),
        compile_s_mean=_mean([run.end.compile_s for run in done]),
        num_steps=max((run.origin.step + len(run.steps) for run in done), default=0),
        num_tokens=max((step.tokens_seen for run in done for step in run.steps[-1:]), default=0),
        step_p50_ms=p50_ms,
        step_p95_ms=p95_ms,
        step_max_ms=max_ms,
        data_wait_share=data_wait_s / train_time_s if data_wait_s is not None and train_time_s else None,
        test=promised and standing(promised, runs, rules.target.loss, rules.target.sigma).result,
    )


def _mean(numbers: Sequence[float]) -> float | None:
    # Exact: `sum` rounds differently from Python 3.12 on, and both versions read a record.
    return math.fsum(numbers) / len(numbers) if numbers else None


def _sd(numbers: Sequence[float]) -> float | None:
    """Return the sample standard deviation, with n - 1 degrees of freedom."""
    mean = _mean(numbers)
    if mean is None or len(numbers) < 2:
        return None
    return math.sqrt(math.fsum((number - mean) * (number - mean) for number in numbers) / (len(numbers) - 1))


def reproduce_command(run: Run) -> str:
    """Return the command line that makes this run again."""
    name = run.file.track.rpartition("@")[0]
    command = ["speedrun", "run", "--track", name, "--recipe", run.file.recipe, "--seed", str(run.file.seed)]
    if name in track.names() and run.file.num_devices != track.load(name).rules.num_devices:
        command += ["--devices", str(run.file.num_devices)]
    if name in track.names() and track.load(name).synthetic is None:
        command += ["--data", "DIR"]
    for key, value in run.file.overrides.items():
        command += ["--set", f"{key}={value}"]
    return shlex.join(command)


def sources(runs: Sequence[Run]) -> list[str]:
    """Return the weights that runs of a record started from, if they were not random: V311 marks these runs."""
    own = {run.file.run_id for run in runs}
    return sorted({run.origin.run_id for run in runs if run.resumed} - own)


def readme_head(manifest: Manifest, summary: Summary, runs: Sequence[Run]) -> str:
    """Return the generated part of `README.md`: title, result card, command, plot."""
    rows = [
        ("track", manifest.track.id),
        ("recipe", f"{manifest.recipe.name}, revision {manifest.recipe.revision}"),
        ("validation loss", _spread(summary.val_loss_mean, summary.val_loss_sd, "nats per token", digits=4)),
        ("target", f"{summary.target_loss:g}, {'reached' if summary.target_reached else 'not reached'}"),
        ("train time", _spread(summary.train_time_s_mean, summary.train_time_s_sd, "s", digits=2)),
        ("cold wall time", _spread(summary.cold_wall_s_mean, None, "s", digits=1)),
        ("runs", f"{summary.num_finished} finished of {manifest.batch.declared_runs} declared"),
        ("steps", f"{summary.num_steps:,} of {summary.step_p50_ms:.1f} ms (median)"),
        ("tokens", f"{summary.num_tokens:,}"),
        ("hardware", f"{manifest.hardware.num_devices} x {manifest.hardware.device_kind}"),
        ("source", f"{manifest.source.lines:,} lines, sha256 `{manifest.source.sha256[:16]}`"),
        ("authors", ", ".join(manifest.about.authors) or "not named"),
        ("parent", manifest.about.parent_record or _parent_recipe(manifest)),
    ]
    if begun_from := sources(runs):
        rows.append(("started from", f"{', '.join(begun_from)}: given weights, not random ones"))
    measured = ("validation loss", "target", "train time", "cold wall time", "steps", "tokens")
    if not summary.num_finished:
        rows = [row for row in rows if row[0] not in measured]
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)])
    changes = "\n".join(f"- {_cell(change)}" for change in manifest.about.changes)
    command = console.clean(reproduce_command(runs[0]))
    blocks = [
        f"# {_cell(manifest.about.title)}",
        "" if summary.num_finished else "**No run finished, so this record holds no result.**",
        "\n".join(f"- {_cell(said)}" for said in summary.broke_off),
        table,
        changes,
        "![loss against train time](plots/loss.svg)" if summary.num_finished else "",
        f"Run it again:\n\n    {command}",
        HEAD_END,
    ]
    return "\n\n".join(block for block in blocks if block)


def _parent_recipe(manifest: Manifest) -> str:
    """Return the parent of the recipe, for records without a parent. The config may hold anything."""
    recipe = manifest.config.get("recipe")
    parent = recipe.get("parent") if isinstance(recipe, dict) else None
    return f"recipe {parent}" if isinstance(parent, str) else "none"


def _spread(mean: float | None, sd: float | None, unit: str, *, digits: int) -> str:
    if mean is None:
        return "none"
    return f"{mean:.{digits}f}{f' (sd {sd:.{digits}f})' if sd is not None else ''} {unit}"


def _cell(text: str) -> str:
    """Escape text, so that it can neither leave a table cell nor hold markup."""
    shown = console.clean(text)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("[", "&#91;")
