"""One process of a run that several share: shared_run.py REQUEST.json HOST:PORT PROCESSES PROCESS MEET_WITHIN_S."""

import sys
from pathlib import Path

from speedrun.ground import console, processes
from speedrun.ground.output import reported
from speedrun.training import meet

HEARTBEAT_S = 10

if __name__ == "__main__":
    request, coordinator, *numbers = sys.argv[1:]
    count, index, meet_s = map(int, numbers)
    with reported(), meet.joined(meet.find_group(coordinator, count, index, HEARTBEAT_S, meet_s)):
        from speedrun.training.request import RunConfig, decoded
        from speedrun.training.train import train

        printer = console.Printer(sys.stdout) if processes.is_first() else None
        train(decoded(Path(request).read_bytes(), RunConfig), printer)
