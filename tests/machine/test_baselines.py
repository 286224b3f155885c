"""Record 21's step, written a second time from the record in plain JAX, has the same losses as ours."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from speedrun import recipes
from speedrun.base import mesh
from speedrun.data.stream import TokenStream
from speedrun.machine import bench_step
from speedrun.train.program import Program

BASELINE = Path(__file__).parents[1] / "baselines" / "jax" / "run"
STEPS = 6


@pytest.mark.compile
def test_a_plain_jax_step_has_the_losses_of_ours(smoke_data, tmp_path):
    """From random parameters: from the initial ones, some gradients are zero but for rounding, which Adam enlarges."""
    recipe = recipes.load("smoke").override({"stages.0.num_sequences": "2"})
    bench_step.write_start(recipe, tmp_path / "start.npz")
    start, noise = dict(np.load(tmp_path / "start.npz")), np.random.default_rng(0)
    given = {name: start.pop(name) for name in [*start] if name != "settings"}
    given = {name: x + 0.1 * noise.standard_normal(x.shape, np.float32) for name, x in given.items()}
    np.savez(tmp_path / "start.npz", **start, **given)
    options = {"steps": STEPS, "first-step": 100, "sequences": 2, "seq-len": 256, "shards": smoke_data}
    options["start"] = tmp_path / "start.npz"
    words = [f"--{name}={value}" for name, value in options.items()]
    theirs = bench_step.run_baseline([sys.executable, str(BASELINE), *words], STEPS)

    program = Program(recipe, mesh.make_mesh(1), 1)
    state = program.init(jax.random.key(0))
    state = state._replace(params=program.layout.pack(given), step=state.step + 100)
    stream, ours = TokenStream(bench_step.folder_shards(smoke_data)), []
    for _ in range(STEPS):
        batch = (mesh.shard(x_BT, program.mesh) for x_BT in stream.batch(2, 256))
        state, metrics = program.train_step_for(program.static_at(100))(state, *batch, program.schedule)
        ours.append(float(metrics.loss))
    assert ours == pytest.approx(theirs.losses, rel=1e-5)
