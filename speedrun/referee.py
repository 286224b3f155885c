"""`speedrun validate --replay`: a record's final state is asked what the record says of it. Executes its source."""

import hashlib
import tempfile
from pathlib import Path
from typing import TextIO

from speedrun import runlog
from speedrun.errors import UsageError
from speedrun.ledger.checks.replay import REPLAY_CHECKS
from speedrun.ledger.record import load
from speedrun.ledger.run import Run
from speedrun.ledger.validate import Report, ask
from speedrun.rerun import Rerun

#: Where a record that brought no checkpoints is run again, so many of them are made.
_CHECKPOINTS = 8
_RESTARTS = 2
_REPLAYED_STEPS = 4


def chosen(run: Run, steps: list[int]) -> tuple[int, ...]:
    """Checkpoints to go on from: nobody knows which before the log is finished.

    The i-th is number sha256("LAST LINE i") mod n of those that are left.
    """
    left, found = sorted(steps), []
    for i in range(min(_RESTARTS, len(left))):
        digest = hashlib.sha256(b"%s %d" % (run.raw_lines[-1], i)).digest()
        found.append(left.pop(int.from_bytes(digest, "big") % len(left)))
    return tuple(sorted(found))


def examined(
    folder: Path, report: Report, *, checkpoints: Path | None, data: Path | None, echo: TextIO
) -> Report:
    """The report with the answers of V601 to V605.

    Args:
        folder: the record.
        report: of the checks that execute nothing; if one of them failed, nothing is executed.
        checkpoints: of the record's first finished run, all that its log names; None: it is run again, and makes some.
        data: folder of shards; None: the track's own.
        echo: where the output of the record's source goes.

    Raises:
        UsageError: if a check failed, no run finished, or the source knows no checkpoints.
        SpeedrunError: if its source ends badly.
    """
    if failed := report.having("failed"):
        raise UsageError(
            f"{folder}: {', '.join(result.check.id for result in failed)} failed; nothing was executed; mend that first"
        )
    record = load(folder)
    if not record.finished:
        raise UsageError(f"{folder}: no run finished; one is needed to look at its final state")
    run = record.finished[0]
    again = Rerun(folder, run.file.run_id)
    if not again.knows_checkpoints:
        raise UsageError(
            f"{folder}: its source is older than checkpoints; 'speedrun replay' compares its losses"
        )
    with tempfile.TemporaryDirectory(prefix="speedrun-replay-") as scratch:
        made = run
        if checkpoints is None:
            every, out = -(-run.start.num_steps // _CHECKPOINTS), Path(scratch, "again")
            made = again.run(out, seed=run.file.seed, data=data, echo=echo, checkpoint_every=every)
            checkpoints = out.with_name(out.name + ".checkpoints")
        # By the log, not by what lies there: who brings checkpoints must not choose among them.
        steps = [event.step for event in made.of(runlog.Checkpoint) if event.step < run.start.num_steps]
        restarts = chosen(run, steps)
        findings = again.examine(checkpoints, restarts, _REPLAYED_STEPS, data=data, echo=echo)
    results = tuple(ask(one.of(run, findings), record) for one in REPLAY_CHECKS)
    return Report(report.results + results, report.strict)
