"""The programs of a GPU run, as its record would carry them. Lowered for H100s that are not here."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from speedrun import recipes
from speedrun.base import mesh as meshes
from speedrun.base import track
from speedrun.record import archive
from speedrun.record.examine.stablehlo import Programs
from speedrun.record.reader import read_programs
from speedrun.train import export_programs
from speedrun.train.program import FOREIGN, Program

pytestmark = pytest.mark.compile
TRACK = track.load("main-8xh100")


@pytest.fixture
def packed(h100, monkeypatch):
    """The archive of a recipe on eight H100s."""
    mesh, real = h100(8), export.export

    def there(function: Any, **options: Any) -> Any:
        def lower(*args: Any) -> Any:
            with jax.default_device(mesh.devices.flat[0]):  # Pallas asks it for the capability of the card
                return real(function, **options)(*args)

        return lower

    def of(recipe: Any) -> bytes:
        program = Program(recipe, mesh)
        assert program.step.plan.rows  # on this machine, before anything asks for the card
        monkeypatch.setattr(export_programs.export, "export", there)
        # Devices that are not here hold no arrays.
        monkeypatch.setattr(Program, "schedule", property(lambda self: self.step.plan.schedule))
        ready: Any = SimpleNamespace(recipe=recipe, program=program, track=TRACK)
        return archive.pack(export_programs.exported(ready))

    return of


@pytest.mark.parametrize("name", ["record21", "record89"])
def test_a_gpu_run_is_examined_on_a_cpu(packed, name):
    """Its second form makes the state that the same recipe makes on a CPU, to the bit, and has the same outputs."""
    recipe = recipes.load(name).override({"size": "smoke"})
    raw = packed(recipe)
    mesh, given = meshes.make_mesh(8), read_programs(raw)
    assert {*given.platforms} == {"cuda", "cpu"}
    found, here = Programs(given, mesh), Program(recipe, mesh)
    state, outs = here.init(jax.random.key(3)), tuple(leaf.sharding for leaf in found.state)
    leaves = found.compiled("init", outs=outs)(jax.random.key_data(jax.random.key(3)))
    same = zip(leaves, jax.tree.leaves(state), strict=True)
    assert all(np.array_equal(one, other) for one, other in same)
    shape = here.shape_at(0)
    ids_BT = np.random.default_rng(0).integers(0, 256, (shape.num_sequences, shape.seq_len)).astype(np.int32)
    batch = [meshes.shard(x, mesh) for x in (ids_BT, np.roll(ids_BT, -1, axis=1))]
    constants = meshes.replicate(found.constants, mesh)
    outs = *outs, NamedSharding(mesh, PartitionSpec())
    *leaves, _ = found.compiled(found.lowered.steps[0], outs=outs)(*leaves, *constants, *batch)
    state, _ = here.train_step_for(shape.static)(state, *batch, here.schedule)
    for one, other in zip(leaves, jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert found.shape(found.scorer("hidden", recipe.num_steps))[1] == recipe.eval_seq_len


def test_record_21_carries_both_of_its_forms_in_little_room(packed):
    """Measured: 178 kB, of which 53 for the CPU. Only those for GPUs call kernels."""
    raw = packed(recipes.load("record21"))
    assert len(raw) < 250_000
    both = read_programs(raw).platforms
    text = export.deserialize(bytearray(both["cuda"].programs["train-0"])).mlir_module()
    assert any(name in text for name in FOREIGN)
    assert not any(name.encode() in both["cpu"].portable["train-0"].module for name in FOREIGN)
