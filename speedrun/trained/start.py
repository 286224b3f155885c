"""`run --init-from`: a run that starts from given weights, as a fine-tune does.

Its first state is written as a checkpoint of step 0, and the run resumes it. So the loop knows nothing of it, the log
names the weights and their digest, and no such run is ranked: none that is resumed is.
"""

import shutil
from pathlib import Path

import jax
import msgspec

from speedrun.data import stream
from speedrun.ground import processes
from speedrun.ground import track as tracks
from speedrun.ground.errors import UsageError
from speedrun.ground.wholefile import PARTIAL, give_name
from speedrun.ledger import format
from speedrun.science import recipes
from speedrun.science.params import Params
from speedrun.science.step import TrainState
from speedrun.trained import sources
from speedrun.training import checkpoint
from speedrun.training.prepare import prepare
from speedrun.training.program import Program
from speedrun.training.request import RunConfig


def start_from(config: RunConfig, source: Path) -> RunConfig:
    """Write the checkpoint of step 0; return the settings of the run that resumes it.

    Raises:
        UsageError: if the track is ranked, several processes share the run, or its folder of checkpoints is in use.
        DataError: if the weights are missing, damaged, not finite, or not those of the recipe.
    """
    track = tracks.load(config.track)
    if track.rules.ranked:
        raise UsageError(
            f"--init-from on {track.id}, which is ranked: a record starts from random weights; choose --track webmini"
        )
    if processes.count() > 1:
        raise UsageError(
            f"--init-from in {processes.count()} processes; need one; leave out what starts others"
        )
    folder = checkpoint.folder_of(config.out)
    if folder.exists():
        raise UsageError(f"{folder} exists already; need a new folder; remove it or pass another --out")
    recipe = recipes.load(config.recipe or track.recipe).override(config.overrides)
    every = config.checkpoint_every or recipe.num_steps  # at least the end is kept
    ready = prepare(msgspec.structs.replace(config, checkpoint_every=every))
    packed, origin = sources.packed_for(ready.program, source)
    state = _beginning(ready.program, packed, config.seed)
    facts = checkpoint.Facts(
        step=0,
        run_id=" ".join(origin.values()),
        config_sha256=format.config_sha256(ready.described),
        cursor=stream.START,
        tokens_seen=0,
        train_time_s=0.0,
        arrays=checkpoint.described(state),
    )
    # Without its step 0 the folder would be that of a run that begins with random weights.
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    with checkpoint.opened(partial, ready.resumable, keep=config.keep_checkpoints) as checkpoints:
        checkpoints.save(state, facts)
    give_name(partial, folder)
    return msgspec.structs.replace(ready.config, resume=True)


def _beginning(program: Program, packed: Params, seed: int) -> TrainState:
    """Return the initial state with these weights; what the optimiser keeps of weights is made from them."""
    fresh = program.init(jax.random.key(seed))

    def begin(packed: Params) -> TrainState:
        return fresh._replace(params=packed, opt_state=program.step.transform.init(packed))

    return jax.jit(begin, out_shardings=program.shardings(program.specs))(packed)
