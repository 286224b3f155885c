"""The outer step: the mean of the islands' weights by tokens, then Nesterov momentum.

    d = weights - mean;  velocity <- momentum velocity + d;  weights <- weights - lr (d + momentum velocity)

Source: Douillard et al. 2023, DiLoCo.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from speedrun.base.rounds import Islands

Weights = Mapping[str, np.ndarray]  #: packed parameters by name


def mean(parts: Sequence[tuple[int, Weights]]) -> dict[str, np.ndarray]:
    """Return the mean of weights in float64, given (tokens, weights) of each island; that of one island is exact."""
    if len(parts) == 1:
        return {name: x.astype(np.float64) for name, x in parts[0][1].items()}
    total, found = sum(tokens for tokens, _ in parts), dict[str, np.ndarray]()
    for tokens, weights in parts:
        for name, x in weights.items():
            found[name] = found.get(name, 0.0) + tokens / total * x.astype(np.float64)
    return found


def stepped(
    settings: Islands, weights: Weights, velocity: Weights, parts: Sequence[tuple[int, Weights]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return new weights, in their dtypes, and the new velocity, in float32."""
    new, moving, lr, momentum = mean(parts), dict(velocity), settings.outer_lr, settings.outer_momentum
    if (lr, momentum) != (1, 0):  # the mean needs a case of its own: `a - (a - x)` is not always x
        for name, x in new.items():
            old = weights[name].astype(np.float64)
            change = old - x
            moving[name] = (momentum * moving[name].astype(np.float64) + change).astype(np.float32)
            new[name] = old - lr * (change + momentum * moving[name].astype(np.float64))
    return {name: x.astype(weights[name].dtype) for name, x in new.items()}, moving


def digest(weights: Weights) -> str:
    """Return the sha256 of weights by name."""
    found = hashlib.sha256()
    for name, x in sorted(weights.items()):
        found.update(f"{name} {x.dtype} {x.shape} ".encode())
        found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
