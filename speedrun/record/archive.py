"""`programs-<digest>.xz`: the programs of a run. A record carries them, so that an examiner runs no code of the record.

    init       u32[2], the data of a key -> the leaves of the state
    constants  nothing -> the constants that the recipe computes
    train      leaves, constants, tokens_BT, targets_BT -> leaves, loss; one for each shape
    hidden     parameters, constants, step, tokens_BT -> hidden state before the head [B, T, D]; one for each `Static`
    logits     parameters, constants, step, x_ND -> [N, V]; one for each `Static`

Each is serialised by `jax.export`: for the CPU, without kernels, so that any machine can examine it, and for GPUs where
they ran. The file is xz over MessagePack, and equal for equal programs: the runs of a batch share one.
"""

import lzma
import re
from typing import Annotated

import msgspec

from speedrun.record.layout import Strict

NAME = re.compile(r"programs-[0-9a-f]{16}\.xz")
#: Of a file: record 21 takes 178,000. Memorised text has no room besides.
MOST_BYTES = 10**6
_MOST = 10**6  #: steps, and leaves
Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=_MOST)]
Numbers = Annotated[tuple[int, ...], msgspec.Meta(max_length=_MOST)]


class Lowered(Strict, frozen=True):
    """The programs of a run for one platform, and in which order it calls them."""

    steps: Names  #: name of the program of each step
    #: What follows "hidden-" and "logits-" in the names for each validation, by its step, the last included.
    scored: dict[int, str]
    programs: dict[str, bytes]


class Archive(Strict, frozen=True):
    """The programs of a run."""

    leaves: Names  #: names of the state's, as in a checkpoint
    num_params: int  #: leaves named `params.*`, in the order in which `hidden` and `logits` take them
    document_tokens: Numbers  #: of each step, at which documents are cut; 0: contiguous text
    platforms: dict[str, Lowered]  #: by the name that `jax.export` has for a platform: cpu, cuda


def name_of(sha256: str) -> str:
    """Return the name of an archive with this digest."""
    return f"programs-{sha256[:16]}.xz"


def pack(archive: Archive) -> bytes:
    """Return an archive as the bytes of its file."""
    return lzma.compress(msgspec.msgpack.encode(archive))
