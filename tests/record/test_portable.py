"""Programs of a record are StableHLO for one device, which is read for years."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from msgspec.structs import replace

from speedrun.base import mesh as meshes
from speedrun.base.errors import UsageError
from speedrun.record.examine.stablehlo import Programs, of_portable
from speedrun.record.reader import read_programs
from speedrun.train.portable import portable

#: Of a smoke run with the settings of `small_run.SMALL`, written by JAX 0.10.2 on 2026-11-29.
FROZEN = Path(__file__).parents[1] / "golden" / "portable.xz"


def test_frozen_programs_run_without_the_form_of_jax_export(monkeypatch):
    """Its `deserialize` may refuse them one day. The loss is that of the JAX that wrote them."""
    monkeypatch.setattr(export, "deserialize", None)
    programs = Programs(read_programs(FROZEN.read_bytes()), meshes.make_mesh(8))
    places = [leaf.sharding for leaf in programs.state]
    leaves = programs.compiled("init", outs=places)(jax.random.key_data(jax.random.key(7)))
    draw, shape = np.random.default_rng(0), programs.shape("train-0")
    ids = [meshes.shard(draw.integers(3, 256, shape).astype(np.int32), programs.mesh) for _ in range(2)]
    losses = []
    for _ in range(2):
        *leaves, loss = programs.compiled("train-0", outs=(*places, NamedSharding(programs.mesh, P())))(
            *leaves, *ids
        )
        losses.append(float(loss))
    assert losses == pytest.approx([5.5451803, 5.4802122], abs=2e-3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_collectives_calls_and_shardings_stay_what_they_compute(replicas):
    mesh = meshes.make_mesh(8, replicas)
    axes, split, whole = mesh.axis_names, P(mesh.axis_names), P()

    def each(x_N, y_N):
        sums_N = jax.lax.psum(jax.lax.psum(jax.scipy.special.erf(x_N), axes[0]), axes[1:])
        return sums_N * y_N, jax.lax.all_gather(x_N, axes, tiled=True)

    def run(x_N, y_N, shift):
        mapped = jax.shard_map(
            each, mesh=mesh, in_specs=(split, split), out_specs=(split, whole), check_vma=False
        )
        first_N, second_N = mapped(x_N, y_N)
        return first_N, second_N + shift

    args = (jnp.arange(16.0), jnp.ones(16), jnp.float32(2))
    specs, outs = (split, split, whole), (split, whole)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    made = portable(export.export(jax.jit(run), platforms=["cpu"])(*placed), specs, outs, dict(mesh.shape))
    text = (read := of_portable(made, mesh, "cpu")).text
    assert not [word for word in ("sdy", "mhlo", "xla.", "composite", "custom_call") if word in text]
    for got, want in zip(jax.jit(read.call)(*placed), run(*args), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(UsageError, match="damaged"):
        of_portable(replace(made, module=made.module + b"0"), mesh, "cpu")
    with pytest.raises(UsageError, match="for a mesh of"):
        of_portable(made, meshes.make_mesh(4), "cpu")
