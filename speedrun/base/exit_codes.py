"""Exit codes in words."""

import signal

from speedrun.base.errors import HANG, INTERRUPTED

_LOST = 134  #: JAX ends the other processes with SIGABRT, which a shell reports as this code

#: All exit codes, as `speedrun --help` and docs/commands.md print them. Scripts may rely on the first words.
EXIT_CODES = {
    0: "done",
    1: "failed: ran, and the answer is no: target missed or a check failed",
    2: "usage: unknown name, bad setting, output folder or device count; no ranked record could hold the run",
    3: "data: shard missing, damaged, foreign or too short",
    4: "storage: a file or checkpoint cannot be written, or no checkpoint is whole",
    5: "non-finite: a loss is no number; the first bad leaf is named",
    HANG: "hang: a phase went past its deadline; all stacks are kept",
    75: "stopped: by SIGTERM, SIGHUP, Ctrl-C or its budget; log and checkpoints are kept",
    INTERRUPTED: "interrupted: a second time, or where there was nothing to keep",
    _LOST: "lost: one of several processes; what they had written is kept",
}


def code_of(exit_code: int) -> str:
    """Return the stable word for an exit code that a shell reports."""
    return EXIT_CODES.get(exit_code, "crashed").partition(":")[0]


def meaning(code: int) -> str:
    """Return an exit code in words; a negative one is the signal that killed the process."""
    known = f"signal {-code}" if code < 0 else EXIT_CODES.get(code, "none of ours")
    known = f"{known}: it crashed, or another process was lost" if code == -signal.SIGABRT else known
    return f"exit code {code} ({known})"
