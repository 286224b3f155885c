"""The child of a keeper that drives islands.

python -m speedrun.islands.child REQUEST.json EVENTS STACKS       as speedrun.train.child
"""

from functools import partial

from speedrun.base import runlog, subprocesses
from speedrun.islands import actors, cluster
from speedrun.train import child, keeper


class Job(keeper.Job, frozen=True):
    """What a driver is to do."""

    settings: runlog.Islands | None = None
    address: str | None = None  #: of Ray; None: one of our own


def main() -> None:
    """Drive the islands that the command line names."""
    with child.attended(Job) as (job, sent), subprocesses.stoppable():
        assert job.settings is not None
        with cluster.connected(job.address, job.settings.islands) as ray:
            with child.importing_jax():
                from speedrun.islands.driver import Driver
                from speedrun.islands.island import ROOTS
                from speedrun.train.recorded import train
            engine_of = partial(actors.Actors, ray, job.address)
            steps = partial(Driver, settings=job.settings, engine_of=engine_of, meet_s=float(job.meet_s))
            train(job.config, steps=steps, roots=ROOTS, **sent)


if __name__ == "__main__":
    main()
