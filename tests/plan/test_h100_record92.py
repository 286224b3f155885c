"""The programs that eight H100 would run for record 92 with its whole table, compiled here without one."""

import anatomy
import deviceless
import pytest
from test_h100_program import names

from speedrun import recipes
from speedrun.base import mesh, track
from speedrun.train import checkpoint
from speedrun.train.program import Program

RECORD = recipes.load("record92")
DEVICES, DIM = 8, RECORD.config.model_dim
#: Weights and waiting sums of a device's rows, in bfloat16.
TABLE_BYTES = 2 * 2 * RECORD.config.ngram_rows * DIM / DEVICES
STEP = 802  #: one of 49,152 tokens a device, without an update of tables; the next one has it


@pytest.fixture(scope="module")
def program(h100) -> Program:
    return Program(RECORD, h100(DEVICES))


def test_a_run_compiles_each_of_its_programs_once():
    program, rules = Program(RECORD, mesh.make_mesh(1)), track.load("main-8xh100")
    assert [*map(len, program.shapes(rules.validates_at))] == [19, 10]


@pytest.mark.compile
@pytest.mark.parametrize("has_event", [False, True], ids=["waiting", "event"])
def test_a_step_updates_its_part_of_the_table_in_place(program, has_event):
    compiled = deviceless.compiled_step(program, STEP + has_event)
    found = anatomy.dissect(compiled)
    memory = compiled.memory_analysis()
    assert TABLE_BYTES < memory.alias_size_in_bytes < 1.05 * TABLE_BYTES
    assert memory.temp_size_in_bytes < TABLE_BYTES / 2, "a copy of the weights would be as large"
    assert found.memory.peak_memory_in_bytes < 50e9
    # The rows of pairs and triples there and back, with room for a tenth more than if all were different.
    tokens = RECORD.stages[2].seq_len
    sent = found.sent_bytes("all-to-all") / (2 * 2 * 2 * tokens * DIM)
    assert 0.85 < sent < 1.2, names(found)
    assert found.sent_bytes("all-gather") < 1e9, names(found)
    assert found.unknown_loops == 0
    # With a sampled loss, ANVIL, and rows that travel.
    _, time, memory = anatomy.prices(compiled, program, STEP + has_event)
    assert time == pytest.approx(1, abs=0.08)
    assert memory == pytest.approx(1, abs=0.1)


@pytest.mark.compile
def test_the_state_is_hashed_where_it_is(program):
    """Before and after the warm-up and each validation."""
    compiled = deviceless.compile_for_target(checkpoint.fingerprint, program.state)
    assert compiled.memory_analysis().temp_size_in_bytes < 1e8
    assert {one.kind for one in anatomy.dissect(compiled).collectives} == {"all-reduce"}


@pytest.mark.compile
def test_the_last_validation_fits_beside_the_state(program):
    found = anatomy.dissect(anatomy.compiled_evaluation(program))
    assert found.memory.peak_memory_in_bytes + TABLE_BYTES / 2 < 45e9  # and the waiting sums
    assert {one.kind for one in found.collectives} == {"all-gather", "all-to-all"}, names(found)
