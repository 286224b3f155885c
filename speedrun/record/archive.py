"""`programs-<digest>.xz`: the programs of a run, so that an examiner needs to run no source of a record.

    init       u32[2], the data of a key -> the leaves of the state
    constants  nothing -> the constants that the recipe computes; those that are derived follow them
    train      leaves, constants, tokens_BT, targets_BT -> leaves, loss; one for each shape
    hidden     parameters, constants, step, tokens_BT -> hidden state before the head [B, T, D]; one for each `Static`
    logits     parameters, constants, step, x_ND -> [N, V]; one for each `Static`

Each is there for the CPU, without kernels, so that any machine can examine it: as StableHLO for one device, which is
promised to be read for five years. If GPUs ran it, it is there for them as `jax.export` serialises it, for half a year.
The file is xz over MessagePack. Equal programs give equal files, so the runs of a batch share one.
"""

import lzma
import re
from typing import Annotated

import msgspec

from speedrun.record.layout import Strict

NAME = re.compile(r"programs-[0-9a-f]{16}\.xz")
MOST_BYTES = 2 * 10**6  #: of a file; record 92 takes 629,000 for a CPU, and about twice as much for GPUs
_MOST = 10**6  #: steps or leaves
Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=_MOST)]
Numbers = Annotated[tuple[int, ...], msgspec.Meta(max_length=_MOST)]


class Array(Strict, frozen=True, array_like=True):
    """An argument or a result of a program."""

    dtype: str
    shape: Numbers  #: of the whole array
    axes: tuple[tuple[str, ...], ...]  #: of the mesh, that share each dimension


class Portable(Strict, frozen=True):
    """A program as StableHLO for one device: `train.portable`."""

    stablehlo: str  #: oldest version that reads it
    sha256: str  #: of `module`
    mesh: dict[str, int]  #: axes with their sizes, in order
    #: Each device runs it on its parts of the arrays; otherwise one runs it on the whole ones.
    per_device: bool
    kept: Numbers  #: the arguments that `module` takes
    ins: tuple[Array, ...]
    outs: tuple[Array, ...]
    module: bytes  #: a portable artifact of StableHLO


class Lowered(Strict, frozen=True):
    """The programs of a run for one platform, and the order of their calls."""

    steps: Names  #: name of the program of each step
    scored: dict[int, str]  #: for each validation, by step: the suffix of "hidden-" and "logits-"
    programs: dict[str, bytes]  #: files of `jax.export`: for GPUs, and of records until November 2026
    portable: dict[str, Portable] = msgspec.field(default_factory=dict)


class Archive(Strict, frozen=True):
    """The programs of a run."""

    leaves: Names  #: of the state, as in a checkpoint
    num_params: int  #: leaves named `params.*`, in the order of the arguments of `hidden` and `logits`
    document_tokens: Numbers  #: most tokens of a document in each step; 0: contiguous text
    platforms: dict[str, Lowered]  #: by their names in `jax.export`: cpu, cuda
    derived: Names = ()  #: constants that are the impossible pairs of the track's vocabulary; none is contained


def name_of(sha256: str) -> str:
    """Return the name of an archive with this digest."""
    return f"programs-{sha256[:16]}.xz"


def pack(archive: Archive) -> bytes:
    """Return an archive as the bytes of its file."""
    return lzma.compress(msgspec.msgpack.encode(archive))
