"""One process of a run that several share: shared_run.py REQUEST.json HOST:PORT PROCESSES PROCESS MEET_WITHIN_S."""

import sys
from functools import partial
from pathlib import Path

from speedrun.base import console, processes, runlog
from speedrun.base.output import reported
from speedrun.train import connect

HEARTBEAT_S = 10

if __name__ == "__main__":
    request, coordinator, *numbers = sys.argv[1:]
    count, index, meet_s = map(int, numbers)
    with reported(), connect.joined(connect.find_group(coordinator, count, index), HEARTBEAT_S, meet_s):
        from speedrun.train.recorded import train
        from speedrun.train.run_config import RunConfig, decoded

        printer = console.Printer(sys.stdout) if processes.is_first() else None
        train(decoded(Path(request).read_bytes(), RunConfig), partial(runlog.RunLog, reader=printer))
