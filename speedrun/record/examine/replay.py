"""`speedrun validate --replay` and `--relower`: check the programs of runs, and whether the source makes them.

A nonce that is unknown beforehand determines the runs, stretches and positions. They do not depend on the log, because
an author could rewrite it until they suit.
"""

import hashlib
import json
import random
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

import msgspec

from speedrun.base import provenance, runlog
from speedrun.base.errors import CheckpointError, UsageError
from speedrun.record import archive, layout
from speedrun.record.checks.v5_source import leaves
from speedrun.record.checks.v6_examination import LOWERED, REPLAY_CHECKS, memory_nats
from speedrun.record.examination import Examination, Findings, Stretch
from speedrun.record.examine import sandbox
from speedrun.record.examine.rerun import Rerun
from speedrun.record.logged_run import Run
from speedrun.record.reader import Record, load
from speedrun.record.validate import Report, ask

_FEW_RUNS = 2
_RESTARTS = 2
_STEPS = 8  #: of a stretch

Which = Literal["some", "all"]


class Options(NamedTuple):
    """Options of an examination."""

    which: Which  #: runs to examine
    nonce: str
    checkpoints: tuple[Path, ...] = ()  #: one folder for each run
    data: Path | None = None  #: folder of shards; None: the track's own
    unsafe: bool = False  #: continue without a sandbox if there is none


def checked_nonce(given: str | None) -> str:
    """Return the nonce that the user gave, after a check, or a random one."""
    if given is not None and not re.fullmatch(r"[0-9a-f]{8,64}", given):
        raise UsageError(f"--nonce {given!r}; need 8 to 64 hex digits, as printed by an earlier examination")
    return secrets.token_hex(8) if given is None else given


def drawn(nonce: str, run_id: str) -> int:
    """Return a 64-bit number that depends only on the nonce and the run."""
    return int.from_bytes(hashlib.sha256(f"{nonce} {run_id}".encode()).digest()[:8], "big")


def chosen(nonce: str, run_ids: Iterable[str], which: Which) -> tuple[str, ...]:
    """Return the runs to examine: all, or the two with the lowest drawn numbers."""
    order = sorted(run_ids, key=lambda run_id: drawn(nonce, run_id))
    return tuple(order if which == "all" else order[:_FEW_RUNS])


def stretches(run: Run, checkpoints: Sequence[int] | None, val_every: int, draws: int) -> tuple[Stretch, ...]:
    """Return the stretches of steps to train again: the whole run if there are no checkpoints.

    With checkpoints (their steps, by the log): the first steps; a few steps after two of them; and all steps from the
    last checkpoint before some validation or the end to the step after it, which reveals training during a pause.
    """
    num_steps = run.start.num_steps
    if checkpoints is None:
        return (Stretch(0, num_steps, from_checkpoint=False),)
    draw, found = random.Random(draws), {Stretch(0, min(_STEPS, num_steps), from_checkpoint=False)}
    for step in draw.sample(sorted(checkpoints), min(_RESTARTS, len(checkpoints))):
        found.add(Stretch(step, min(step + _STEPS, num_steps), from_checkpoint=True))
    bound = draw.choice([*range(val_every, num_steps, val_every), num_steps])
    start = max((step for step in checkpoints if step < bound), default=0)
    found.add(Stretch(start, min(bound + 1, num_steps), from_checkpoint=start > 0))
    return tuple(sorted(found, key=lambda one: (one.start, one.stop)))


def examined(folder: Path, report: Report, options: Options, echo: TextIO) -> Report:
    """Return the report on a record with the results of V601 to V609 added."""
    record = _sound(folder, report)
    runs = {run.folder: run for run in record.finished}
    given = _owners(options.checkpoints, runs)
    names = chosen(options.nonce, runs, options.which)
    reruns = [Rerun(folder, options.data, echo, run_id=name, unsafe=options.unsafe) for name in names]
    made = record.reference_run.of(runlog.Exported)[0]
    raw = record.raw[archive.name_of(made.sha256)]  # V003: that of all runs
    print(sandbox.protections(unsafe=options.unsafe), file=echo)
    again = f"nonce {options.nonce}; --nonce {options.nonce} repeats it"
    print(f"examining {len(names)} of {len(runs)} runs, {again}", file=echo, flush=True)
    names = [rerun.old.folder for rerun in reruns]
    found = [_examined(rerun, raw, given.get(rerun.old.folder), options.nonce) for rerun in reruns]
    record = replace(record, findings=dict(zip(names, found, strict=True)))
    bytes_, literals = found[0].constant_bytes, found[0].num_literals
    worth = f"worth at most {memory_nats(bytes_, record.reference_run.vals[-1].tokens):.4f} nats of memory"
    print(f"constants: {bytes_:,} bytes, {worth}; {literals} are single numbers, to be read", file=echo)
    return Report(report.results + tuple(ask(one, record) for one in REPLAY_CHECKS), report.strict)


def _sound(folder: Path, report: Report) -> Record:
    """Load a record that passed all other checks."""
    if failed := report.having("failed"):
        ids = ", ".join(result.check.id for result in failed)
        raise UsageError(f"{folder}: {ids} failed; nothing was executed; fix that first")
    record = load(folder)
    if not record.finished:
        raise UsageError(f"{folder}: no run finished; need a final state to examine")
    return record


def relowered(folder: Path, report: Report, options: Options, echo: TextIO) -> Report:
    """Lower the source again; return the report with the result of V610 added."""
    record = _sound(folder, report)
    run, (made,) = record.reference_run, record.reference_run.of(runlog.Exported)

    def jax(software: dict[str, str]) -> str:
        return " and ".join(f"{name} {software.get(name)}" for name in ("jax", "jaxlib"))

    def find(_: Record) -> Iterator[str]:
        rerun = Rerun(folder, options.data, echo, run_id=run.folder, unsafe=options.unsafe)
        print(f"lowering the source of {run.folder} again", file=echo, flush=True)
        rerun.check_data()
        programs, facts = rerun.lowered()
        if (found := layout.sha256(programs)) != made.sha256:
            yield f"{run.folder}: its source makes {archive.name_of(found)}, not {archive.name_of(made.sha256)}"
        if facts.config != run.start.config:
            ours, theirs = leaves(facts.config), leaves(run.start.config)
            names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
            yield f"{run.folder}: its source makes another config: {', '.join(names[:5])}"
        plan = json.loads(msgspec.json.encode(run.of(runlog.Plan)[0]))
        for name in (name for name, value in facts.plan.items() if plan.get(name, {}) != value):
            yield f"{run.folder}: its source makes {name} {facts.plan[name]}, the log says {plan.get(name)}"
        for step in run.steps:
            if (due := facts.inputs[step.step : step.step + 1]) != (step.inputs,):
                yield f"{run.folder}: step {step.step} has inputs {step.inputs}, its source makes {due}"
                break

    (harness,) = (result for result in report.results if result.check.id == "V503")
    theirs, ours = jax(run.preflight.software), jax(provenance.software())
    unproven = f"lowered by {theirs}; here is {ours}, which may lower differently" if theirs != ours else ""
    from speedrun.base.mesh import has_gpu  # it imports JAX

    if run.preflight.platform == "gpu" and not has_gpu():
        unproven = "lowered for a GPU, which only a machine with one does; --replay examines it here"
    if harness.status != "ok":
        unproven = "the harness of its source is unknown: see V503"
    if unproven:
        lowered = replace(LOWERED, find=lambda _: [unproven], severity="warning")
    else:
        lowered = replace(LOWERED, find=find)
        print(sandbox.protections(unsafe=options.unsafe), file=echo, flush=True)
    return Report((*report.results, ask(lowered, record)), report.strict)


def _owners(folders: Iterable[Path], runs: dict[str, Run]) -> dict[str, Path]:
    """Return the folder of checkpoints of each run, by the name in its last checkpoint."""
    from speedrun.train import checkpoint, run_config  # the first imports JAX

    found = {}
    for folder in folders:
        try:
            facts = checkpoint.read_facts(folder, run_config.steps_in(folder)[0])
            found[runs[facts.run_id].folder] = folder
        except (OSError, LookupError, checkpoint.Damaged, CheckpointError):
            raise UsageError(
                f"{folder} holds no checkpoints of a finished run of this record; need a run's folder of checkpoints; "
                "leave it out to train the run again"
            ) from None
    return found


def _examined(rerun: Rerun, raw: bytes, checkpoints: Path | None, nonce: str) -> Findings:
    run, rules = rerun.old, rerun.rules
    draws = drawn(nonce, run.folder)
    rerun.check_data()
    # The steps come from the log, not the folder: whoever provides checkpoints must not choose among them.
    steps = [event.step for event in run.of(runlog.Checkpoint) if event.step < run.start.num_steps]
    with tempfile.TemporaryDirectory(prefix="speedrun-examination-") as scratch:
        programs = Path(scratch, "programs.xz")
        programs.write_bytes(raw)
        wanted = Examination(
            programs=programs,
            track=rules.id,
            data=rerun.data,
            run_seed=run.start.seed,
            platform=run.preflight.platform,
            num_steps=run.start.num_steps,
            held_nonce="".join(one.nonce for one in run.of(runlog.HeldOut)),
            num_devices=run.preflight.num_devices,
            replicas=run.start.config.get("replicas", 1),
            checkpoints=checkpoints and checkpoints.absolute(),
            stretches=stretches(run, steps if checkpoints else None, rules.rules.val_every, draws),
            draws=draws,
            findings=Path(scratch, "findings.json"),
            islands=next(iter(run.of(runlog.Islands)), None),
            rounds=rerun.rounds,
        )
        return rerun.examine(wanted)
