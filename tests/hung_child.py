"""A child of a keeper that hangs."""

import threading

from speedrun.train import child, keeper

if __name__ == "__main__":
    with child.attended(keeper.Job) as (_, sent):
        sent["phases"].enter("data")
        threading.Event().wait()
