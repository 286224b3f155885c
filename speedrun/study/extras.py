"""What a single run does beside training, if it is asked to."""

from pathlib import Path
from typing import NamedTuple

from speedrun.ground.errors import UsageError
from speedrun.trained import samples
from speedrun.training.request import RunConfig


class Extras(NamedTuple):
    """What a run does beside training, in its first process."""

    ghost: str | None = None  #: as in `--ghost`
    wandb: str | None = None  #: project to which the log is sent
    watch_port: int | None = None  #: of a page; None: no page
    sample_every: int | None = None  #: steps
    sample_prompts: tuple[str, ...] = ()
    init_from: Path | None = None  #: weights to start from

    def samples(self, config: RunConfig) -> samples.Request | None:
        """Return what is to be sampled of a run."""
        if self.sample_every is None:
            return None
        path = samples.path_of(config.out)
        if not config.resume and path.exists():
            raise UsageError(f"{path} has the samples of another run; move it away, or pass another --out")
        every = config.checkpoint_every
        if self.sample_every % (every or self.sample_every):
            raise UsageError(
                f"--sample-every {self.sample_every}; need a multiple of --checkpoint-every {every}"
            )
        return samples.Request(config.out, self.sample_every, self.sample_prompts, config.recipe, config.data)
