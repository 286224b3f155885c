"""Record 92 as it is run: its sibling, and what it refuses. tests/test_golden92.py has the rest."""

import pytest

from speedrun import recipes
from speedrun.base import mesh
from speedrun.base.errors import UsageError
from speedrun.science.params import count
from speedrun.train import contract, footprint
from speedrun.train.program import Program

RECORD = recipes.load("record92")
SMOKE = RECORD.override({"size": "smoke"})


def test_its_numbers_of_parameters_and_tokens_are_the_published_ones():
    table = RECORD.table(RECORD.config)
    ngrams = table.pop("ngram_embed").size
    assert (count(table), ngrams) == (300_432_883, 64_975_011_840)
    assert RECORD.total_tokens == 328_663_040


@pytest.mark.compile
def test_its_sibling_is_a_program_whose_state_has_few_bytes():
    """Also with columns that are sampled, which the sibling has too few ids for."""
    few = SMOKE.override({"schedule.phases.1.columns": "(200,)"})
    program = contract.checked(Program(few, mesh.make_mesh(8), vocabulary=()))
    assert 8 * footprint.state_bytes(program) <= 16 * count(few.table(few.config))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"config.mix_dim": "48"}, "groups that fill the model"),
        ({"config.ngram_rows": "15"}, "need an even number, at least 16"),
        ({"config.vocab_size": "200_000"}, "need at most 107,3"),
        ({"config.layers.8.extras": "()"}, "layers 1, 2, 8 and 10 need 'value'"),
    ],
)
def test_a_setting_that_would_do_nothing_or_fail_is_refused(setting, said):
    with pytest.raises(UsageError, match=said):
        SMOKE.override(setting)
