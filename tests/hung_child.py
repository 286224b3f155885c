"""A child of a keeper that hangs, and takes no SIGTERM."""

import signal
import threading

from speedrun.train import child, keeper

if __name__ == "__main__":
    with child.attended(keeper.Job) as (_, sent):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sent["phases"].enter("data")
        threading.Event().wait()
