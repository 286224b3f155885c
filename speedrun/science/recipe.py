"""Recipes: immutable values with everything that affects the loss curve, and nothing else."""

import ast
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from types import FunctionType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
import optax

from speedrun.base import field_types
from speedrun.base.errors import UsageError, unknown
from speedrun.base.field_types import Count, Natural, Positive, Steps
from speedrun.science.inputs import Inputs
from speedrun.science.kernels.dispatch import Kernels
from speedrun.science.params import Dtype, Layout, Params, Table
from speedrun.science.variants import SIZES, WIDTH, Rules, Size


@dataclass(frozen=True, slots=True)
class Stage:
    """A period of training with static shapes."""

    num_steps: Steps
    num_sequences: Count  #: per step, over all devices
    seq_len: Count  #: tokens
    document_tokens: Natural = 0  #: pack whole documents, cut at this length; 0: contiguous text

    @property
    def batch_tokens(self) -> int:
        """Tokens per step."""
        return self.num_sequences * self.seq_len


def no_carry(_: Any) -> Params:
    """Carry nothing from step to step."""
    return {}


#: The bytes of each id, b"" for special tokens; () if the data does not define them.
Vocabulary = tuple[bytes, ...]
#: Arrays by name; a record need not contain functions that compute them, nor `base.bpe_pairs.IMPOSSIBLE_PAIRS`.
Constants = dict[str, np.ndarray | Callable[[], jax.Array] | str]


def no_constants(_: Any, __: Vocabulary) -> Constants:
    """Return no constants, so that no vocabulary is loaded."""
    return {}


class Batch(NamedTuple):
    """The sequences of a micro-batch."""

    tokens_BT: jax.Array  #: i32
    targets_BT: jax.Array  #: i32, the token after each token
    carry: Params  #: [B, ...], `Loss.carry` of the previous step
    index_B: jax.Array  #: i32, the index of each sequence in the step, over all devices


class Loss(NamedTuple):
    """The training loss of a micro-batch."""

    objective: jax.Array  #: f32 [], to minimise; averaged over the micro-batches of a step
    nll: jax.Array  #: f32 [], mean nats per target, for the log
    carry: Params = no_carry(None)  #: [B, ...], for the next step


@dataclass(frozen=True, slots=True)
class Expected:
    """The loss that runs of a recipe are expected to reach, from earlier ones."""

    recipe: str  #: its name; one that is derived from it has another
    track: str  #: whose data they validated on
    loss: Positive  #: mean of their final losses
    sd: Positive | None  #: None if unknown
    num_runs: Count
    source: str  #: whose runs they were


class OptimizerLike(Protocol):
    """The optimiser of a recipe."""

    def transform(self, layout: Layout, /) -> optax.GradientTransformation:
        """Return an optax transformation of packed parameters; its `update` also gets `inputs`."""
        ...


class ScheduleLike(Protocol):
    """The schedule of a recipe."""

    def at(self, step: int, num_steps: int, /) -> dict[str, Any]:
        """Return the inputs of a step by name. NumPy values are traced; Python values are compiled in."""
        ...


ConfigT = TypeVar("ConfigT")
OptimizerT = TypeVar("OptimizerT", bound=OptimizerLike)
ScheduleT = TypeVar("ScheduleT", bound=ScheduleLike)
#: (params, tokens_BT, inputs, config, kernels) -> x_BTD, the final hidden states
Forward = Callable[[Params, jax.Array, Inputs, ConfigT, Kernels], jax.Array]


@dataclass(frozen=True, slots=True)
class Recipe(Generic[ConfigT, OptimizerT, ScheduleT]):
    """The science of a run. Create variants with `dataclasses.replace`, not with flags.

    Functions get whole parameters by name, or rows that are read, in the compute dtype, and the inputs of the step.
    """

    name: str
    summary: str
    parent: str | None
    revision: int  #: incremented when the pinned trace changes
    #: Model dataclass with vocab_size, and document_token if the model reads documents.
    config: ConfigT
    table: Callable[[ConfigT], Table]
    forward: Forward[ConfigT]
    #: (params, x_ND, inputs, config) -> [N, V], for the scorer; rows must not depend on each other
    logits: Callable[[Params, jax.Array, Inputs, ConfigT], jax.Array]
    loss: Callable[[Params, Batch, Inputs, ConfigT, Kernels, Forward], Loss]  #: gets the recipe's `forward`
    optimizer: OptimizerT
    schedule: ScheduleT
    stages: tuple[Stage, ...]
    eval_sequences: Count  #: per validation pass, over all devices
    eval_seq_len: Count
    compute_dtype: Dtype
    carry: Callable[[ConfigT], Params] = no_carry  #: config -> initial `Batch.carry` for one sequence
    #: Inputs that are the same at every step.
    constants: Callable[[ConfigT, Vocabulary], Constants] = no_constants
    #: Said about the recipe, and no part of it: the result that is expected without overrides; what else to do about a
    #: loss that is no number, besides a lower learning rate; rules for other sizes; what switches off each feature; and
    #: the overrides that made it, as `--set` has them.
    expected: Expected | None = field(default=None, repr=False, compare=False)
    if_nan: str = field(default="", repr=False, compare=False)
    overrides: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    sizes: Rules = field(default_factory=dict, repr=False, compare=False)
    features: Mapping[str, Rules] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.stages or not all(isinstance(stage, Stage) for stage in self.stages):
            raise ValueError(f"stages is {self.stages}; need at least one Stage")
        field_types.check(self)

    @property
    def num_steps(self) -> int:
        """Total number of steps in all stages."""
        return sum(stage.num_steps for stage in self.stages)

    @property
    def total_tokens(self) -> int:
        """Total number of tokens in all stages."""
        return sum(stage.num_steps * stage.batch_tokens for stage in self.stages)

    def stage_of(self, step: int) -> int:
        """Return the index of the stage that contains `step`."""
        if found := [i for i in range(len(self.stages)) if step in self.steps_of(i)]:
            return found[0]
        raise ValueError(f"got step {step}, need one below {self.num_steps}")

    def steps_of(self, stage: int) -> range:
        """Return the steps of a stage."""
        start = sum(one.num_steps for one in self.stages[:stage])
        return range(start, start + self.stages[stage].num_steps)

    def inputs_at(self, step: int) -> dict[str, Any]:
        """Return the inputs of a step by name; the last validation has those of step `num_steps`."""
        return self.schedule.at(step, self.num_steps)

    def read(self, params: Params, tokens_BT: jax.Array) -> Params:
        """Return whole parameters as the model gets them: of a table that `reads`, the rows of these tokens."""
        reads = Layout(self.table(self.config)).reads.items()
        return params | {name: params[name][ids_of(tokens_BT)] for name, ids_of in reads}

    def override(self, changes: Mapping[str, str | float | tuple[Any, ...]]) -> "Recipe":
        """Return a recipe with changed settings: `{"config.model_dim": 64, "stages.0.num_steps": "20"}`.

        All settings change together, after the settings that `size` implies.

        Raises:
            UsageError: if a setting is unknown, has a value of the wrong type, or identifies the recipe.
        """
        texts = {key: str(value) for key, value in changes.items()}
        rest = {key: text for key, text in texts.items() if key != "size"}
        base = self._at(texts["size"], rest) if "size" in texts else self
        known, new = settings(base), {}
        for key, text in rest.items():
            if key in IDENTITY:
                raise UsageError(f"setting {key!r} identifies the recipe; to change it, write a recipe file")
            if key not in known:
                raise unknown("setting", key, {*known, "size"} - {*IDENTITY})
            new[key] = _literal(known[key], key, text)
        return dataclasses.replace(_rebuilt(base, new), overrides={**self.overrides, **texts})

    def _at(self, name: str, given: Collection[str]) -> "Recipe":
        """Return the recipe at a size; raise UsageError for a multiple of the width without a rule, unless `given`."""
        known = settings(self.config, "config.")
        if name not in SIZES or not self.sizes or known.get("config.model_dim") != WIDTH:
            need = f"need {', '.join(SIZES)}, of a recipe with sizes and config.model_dim={WIDTH}"
            raise UsageError(f"size={name} of recipe {self.name}; {need}")
        new = self._following(self.sizes, _nodes(self), SIZES[name])
        for key, old in known.items():
            if isinstance(old, int) and old % WIDTH == 0 < old and key not in {*new, *given}:
                raise UsageError(f"size={name} has no rule for {key}, a multiple of the width; --set it, too")
        return _rebuilt(self, new)

    def without(self, feature: str) -> dict[str, Any]:
        """Return the settings that switch a feature off, floats in six digits; none if the recipe does not have it."""
        known, off = settings(self), dict[str, Any]()
        for pattern, rule in self.features[feature].items():
            for key, new in self._following({pattern: rule}, known).items():
                short = float(f"{new:.6g}") if isinstance(new, float) else new
                off |= {key: short} if short != known[key] else {}
            if not off:
                break
        return off

    def _following(self, rules: Rules, known: Mapping[str, Any], size: Size | None = None) -> dict[str, Any]:
        return {
            key: rule(old, self, size or key) if callable(rule) else rule
            for pattern, rule in rules.items()
            for key, old in known.items()
            if fnmatch(key, pattern)
        }


IDENTITY = ("name", "summary", "parent", "revision")


def settings(node: Any, above: str = "") -> dict[str, Any]:
    """Return all settings (numbers, strings and tuples of them) by dotted name."""
    found = _nodes(node, above).items()
    return {k: v for k, v in found if isinstance(v, int | float | str | tuple) and not _parts(v)}


def _nodes(node: Any, above: str = "") -> dict[str, Any]:
    """Return the parts of a value, and theirs, by dotted name."""
    found: dict[str, Any] = {}
    for name, part in _parts(node).items():
        found |= {above + name: part, **_nodes(part, f"{above}{name}.")}
    return found


def _parts(node: Any) -> dict[str, Any]:
    """Return the children of a value by name."""
    if isinstance(node, tuple) and any(map(dataclasses.is_dataclass, node)):
        return {str(i): part for i, part in enumerate(node)}
    if dataclasses.is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if field.repr}
    return {}


def describe(value: Any) -> Any:
    """Return a recipe or a part of it as JSON; functions become their dotted names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: describe(part) for name, part in _parts(value).items()}
        return {"kind": f"{type(value).__module__}.{type(value).__qualname__}", **fields}
    if type(value) is tuple:
        return [describe(v) for v in value]  # pyright: ignore[reportGeneralTypeIssues]
    if type(value) in (bool, int, float, str, type(None)):
        return value
    kind = type(value).__qualname__
    if not hasattr(value, "__qualname__"):
        raise UsageError(f"a setting is of type {kind}; need numbers, text, tuples, dataclasses, functions")
    # A wrapper has the name of its function, but may compute something else.
    wrapped = "" if isinstance(value, FunctionType | type) else f"{kind} of "
    return f"{wrapped}{value.__module__}.{value.__qualname__}"


def _rebuilt(node: Any, new: Mapping[str, Any], above: str = "") -> Any:
    """Return `node` with new settings by dotted name. Each value is rebuilt once, so settings can change together."""
    parts, fresh = _parts(node), {}
    for name, part in parts.items():
        key = above + name
        fresh[name] = new[key] if key in new else _rebuilt(part, new, f"{key}.")
    if fresh == parts:
        return node
    try:
        return tuple(fresh.values()) if isinstance(node, tuple) else dataclasses.replace(node, **fresh)
    except (ValueError, ZeroDivisionError) as error:
        given = ", ".join(f"{key}={value}" for key, value in new.items() if key.startswith(above))
        raise UsageError(f"setting {given}: {error}") from None


def _literal(old: Any, key: str, text: str) -> Any:
    """Parse `text` as a value of the same type as `old`."""
    kind = type(old)
    if kind is str:
        return text.strip()
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError):
        value = ast.literal_eval(text)  # nor does `float` raise others
        value = float(value) if kind is float and type(value) is int else value
        if type(value) is kind and (kind is not float or math.isfinite(value)):
            return value
    need = {int: "a whole number", float: "a number"}.get(kind, "a value")
    raise UsageError(f"setting {key}={text[:80]!r}: need {need} like {old!r}")
