"""The constants of a recipe: arrays, functions that compute them, and what is derived from the vocabulary."""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import jax
import numpy as np

from speedrun.base.bpe_pairs import IMPOSSIBLE_PAIRS, impossible_pairs
from speedrun.base.errors import UsageError
from speedrun.science.inputs import Arrays
from speedrun.science.recipe import Recipe, Vocabulary

MOST_BYTES = 2**25  #: of a recipe: on each device, and in each program of a record


class RecipeConstants:
    """The constants of one recipe, given the bytes of each id (None: unknown, as in a plan)."""

    def __init__(self, recipe: Recipe, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = (b"",) * recipe.config.vocab_size if vocabulary is None else vocabulary
        try:
            self._given = dict(recipe.constants(recipe.config, self._vocabulary))
        except LookupError as error:
            raise UsageError(f"its constants raise {error!r}; need some for any vocabulary") from None

    @cached_property
    def computed(self) -> dict[str, Callable[[], jax.Array]]:
        """Those that are functions: a record carries their programs instead of the arrays."""
        return {name: jax.jit(x) for name, x in self._given.items() if callable(x)}

    @cached_property
    def derived_names(self) -> list[str]:
        """Names of those of which a record carries nothing else."""
        return [name for name, x in self._given.items() if isinstance(x, str) and x == IMPOSSIBLE_PAIRS]

    @cached_property
    def derived(self) -> Arrays:
        """The arrays of these."""
        return derived(self.derived_names, self._vocabulary)

    @property
    def passed(self) -> list[str]:
        """Names of the arrays that the programs of a record take as arguments."""
        return [*self.computed, *self.derived]

    def arrays(self) -> Arrays:
        """Return copies of all arrays; raise UsageError if they are not plain arrays of numbers."""
        given: dict[str, Any] = {name: x for name, x in self._given.items() if name not in self.derived_names}
        given |= {name: np.asarray(make()) for name, make in self.computed.items()} | self.derived
        for name, x in given.items():
            if type(x) is not np.ndarray or x.dtype.kind not in "biuf" or x.itemsize > 4:
                what = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
                raise UsageError(f"its constants give {name!r} as {what}; need NumPy's, of 32 bits or less")
        if (size := sum(x.nbytes for x in given.values())) > MOST_BYTES:
            raise UsageError(f"its constants have {size:,} bytes; need {MOST_BYTES:,} or less")
        return {name: x.copy() for name, x in given.items()}


def derived(names: Iterable[str], vocabulary: Vocabulary) -> Arrays:
    """Return the arrays of `impossible_pairs` under each name; raise UsageError without a vocabulary."""
    if names and not vocabulary:
        raise UsageError(f"{IMPOSSIBLE_PAIRS} need the bytes of ids; choose a track that has them")
    pairs = impossible_pairs(vocabulary)._asdict() if names else {}
    return {f"{name}.{field}": x for name in names for field, x in pairs.items()}
