"""The outer step: the mean of the islands' weights by tokens, then Nesterov momentum.

    d = weights - mean;  velocity <- momentum velocity + d;  weights <- weights - lr (d + momentum velocity)

Source: Douillard et al. 2023, DiLoCo.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from speedrun.base.limits import Momentum, Positive

Weights = Mapping[str, np.ndarray]  #: packed parameters by name


class Outer(msgspec.Struct, frozen=True):
    """Settings of the outer step."""

    lr: Positive = 1.0
    momentum: Momentum = 0.0

    @property
    def is_mean(self) -> bool:
        """Whether the step is the mean itself, which needs a case of its own: `a - (a - x)` is not always x."""
        return self.lr == 1 and self.momentum == 0


def mean(parts: Sequence[tuple[int, Weights]]) -> dict[str, np.ndarray]:
    """Return the mean of weights in float64, given (tokens, weights) of each island; that of one island is exact."""
    total = sum(tokens for tokens, _ in parts)
    if len(parts) == 1:
        return {name: x.astype(np.float64) for name, x in parts[0][1].items()}
    shares = [tokens / total for tokens, _ in parts]

    def of(name: str) -> np.ndarray:
        return np.add.reduce(
            [share * w[name].astype(np.float64) for share, (_, w) in zip(shares, parts, strict=True)]
        )

    return {name: of(name) for name in parts[0][1]}


def stepped(
    outer: Outer, weights: Weights, velocity: Weights, parts: Sequence[tuple[int, Weights]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return new weights, in their dtypes, and the new velocity, in float32."""
    new, moving = mean(parts), {name: np.asarray(x, np.float32) for name, x in velocity.items()}
    if not outer.is_mean:
        for name, x in new.items():
            old = weights[name].astype(np.float64)
            change = old - x
            moving[name] = (outer.momentum * moving[name].astype(np.float64) + change).astype(np.float32)
            new[name] = old - outer.lr * (change + outer.momentum * moving[name].astype(np.float64))
    return {name: x.astype(weights[name].dtype) for name, x in new.items()}, moving


def digest(weights: Weights) -> str:
    """Return the sha256 of weights by name."""
    found = hashlib.sha256()
    for name, x in sorted(weights.items()):
        found.update(f"{name} {x.dtype} {x.shape} ".encode())
        found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
