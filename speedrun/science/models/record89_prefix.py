"""The prefix of each token, which record 88 of the PyTorch speedrun (2026) has its model predict besides the token."""

import numpy as np


def prefixes(vocabulary: tuple[bytes, ...]) -> np.ndarray:
    """Return the id with the longest proper prefix of each id's bytes, or -1 if none has one: i32 [V].

    Args:
        vocabulary: the bytes of each id; b"" for ids without bytes, which have no prefix and are none.
    """
    ids = {token: index for index, token in enumerate(vocabulary) if token}

    def longest(token: bytes) -> int:
        shorter = (token[:length] for length in range(len(token) - 1, 0, -1))
        return next((ids[part] for part in shorter if part in ids), -1)

    return np.array([longest(token) for token in vocabulary], np.int32)
