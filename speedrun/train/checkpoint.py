"""Checkpoints: the state of a run after a step, written by orbax, with our own fingerprints of arrays.

    RECORD.checkpoints/run.json     the settings of the run
    RECORD.checkpoints/20/          the state after 20 steps, one array for each packed name, and `CheckpointFacts`

orbax writes in the background and renames a finished step, so a process may die at any moment. It has no digests and
casts a wrong dtype silently. So we digest arrays, facts and `run.json`, and compare dtypes before reading.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import msgspec

from speedrun.base import faults, processes
from speedrun.base.atomic_files import give_name, lock_folder, require_regular, write_whole
from speedrun.base.errors import CheckpointError, translate_os_errors, translate_read_errors
from speedrun.base.mesh import fetch
from speedrun.data import stream
from speedrun.science.step import TrainState
from speedrun.train.program import Program
from speedrun.train.run_config import RUN, read_sealed, seal, steps_in

_T = TypeVar("_T")


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array of a state."""

    shape: tuple[int, ...]
    dtype: str
    digest: str  #: 64 bits of `fingerprint`


class CheckpointFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of a run, and a description of its arrays."""

    step: int  #: steps that are done
    run_id: str
    config_sha256: str
    cursor: stream.Cursor  #: of the next token
    tokens_seen: int
    train_time_s: float  #: on the ranked clock
    arrays: dict[str, Array]


@jax.jit
def fingerprint(state: Any) -> jax.Array:
    """Return a 64-bit hash of a tree of arrays, u32[2].

    Integer sums do not depend on their order, so the number of devices does not change the hash.
    """
    lanes = jnp.zeros(2, jnp.uint32)
    for leaf in jax.tree.leaves(state):
        flat = leaf.reshape(-1)
        bits = flat.view(f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        place = jax.lax.iota(jnp.uint32, flat.size)
        odd = (place[None, :] * jnp.array([[2654435761], [2246822519]], jnp.uint32)) | 1
        mixed = (bits[None, :] ^ (bits[None, :] >> 15)) * odd
        lanes = lanes * jnp.uint32(1000003) + jnp.sum(mixed ^ (mixed >> 13), axis=1, dtype=jnp.uint32)
    return lanes


def state_hash(state: Any) -> str:
    """Return `fingerprint` as 16 hex digits."""
    return fetch(fingerprint(state)).astype(">u4").tobytes().hex()


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a state by flat name, such as `params.embed`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def spec(x: Any) -> str:
    """Return dtype and shape of an array, or the type of anything else."""
    return f"{x.dtype}{[*x.shape]}" if hasattr(x, "dtype") else type(x).__name__


def differences(
    got: dict[str, Any], need: dict[str, Any], shown: Callable[[Any], str] = spec
) -> Iterator[str]:
    """Yield a message for each array that differs as `shown`: in dtype or shape."""
    for name in {**need, **got}:
        found, wanted = (shown(arrays[name]) if name in arrays else "nothing" for arrays in (got, need))
        if found != wanted:
            yield f"{name} is {found}, need {wanted}"


def newest_whole(
    folder: Path, steps: Iterable[int], read: Callable[[int], _T]
) -> tuple[_T, dict[int, "Damaged"]]:
    """Return what `read` gives of the first whole step, and why those before it are not; CheckpointError if none is."""
    damaged: dict[int, Damaged] = {}
    for step in steps:
        try:
            return read(step), damaged
        except Damaged as damage:
            damaged[step] = damage
    reasons = "".join(f" {step} is damaged ({damage});" for step, damage in damaged.items())
    others = "choose another --step" if len(damaged) < len(steps_in(folder)) else "run again, in a new folder"
    raise CheckpointError(f"{folder}: no whole checkpoint;{reasons} need one; {others}")


def read_facts(folder: Path, step: int) -> CheckpointFacts:
    """Read the facts of a checkpoint; raise `Damaged`, or CheckpointError if another cause prevents it."""
    with raise_damaged(where := folder / str(step)):
        facts = read_sealed(where / "facts" / "metadata", CheckpointFacts)
        if facts.step != step:
            raise ValueError(f"it holds step {facts.step}")
    return facts


def read_arrays(folder: Path, facts: CheckpointFacts, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """Return arrays of a checkpoint by flat name, placed as `wanted`: all of a state, or of its parameters.

    Raise CheckpointError unless they have the form of `wanted`, and `Damaged` if a digest differs.
    """
    import orbax.checkpoint as ocp

    checkpoint, parts = folder / str(facts.step), {name.partition(".")[0] for name in wanted}
    held = {name: array for name, array in facts.arrays.items() if name.partition(".")[0] in parts}
    for difference in differences(held, wanted):  # before orbax casts or cuts an array to fit
        raise CheckpointError(f"{checkpoint}: {difference}; use the recipe that trained it")
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, how, partial_restore=True)
    with raise_damaged(checkpoint):
        found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(checkpoint / "state", args=args)
    for name, array in described(found).items():
        if array.digest != facts.arrays[name].digest:
            raise Damaged(f"{name} is not what was written")
    return {name: found[name] for name in wanted}


_digests = jax.jit(lambda arrays: {name: fingerprint(array) for name, array in arrays.items()})


def described(state: Any) -> dict[str, Array]:
    """Return shape, dtype and digest of each array."""
    arrays = named(state)
    digests = fetch(_digests(arrays))
    return {
        name: Array(x.shape, str(x.dtype), digests[name].astype(">u4").tobytes().hex())
        for name, x in arrays.items()
    }


@contextmanager
def opened(folder: Path, run: bytes, *, keep: int) -> Iterator["Checkpoints"]:
    """Open and lock a run's folder of checkpoints. All are durable at the end of the block.

    With several processes, each writes its part; process 0 holds the lock and cleans the folder. `run` is the text of
    `run.json`. The newest `keep` checkpoints stay; 0 keeps all.
    """
    with ExitStack() as held:
        if processes.is_first():
            held.enter_context(lock_folder(folder, refuse=CheckpointError))
            with translate_os_errors(folder, CheckpointError):
                for left in folder.glob("*.orbax-checkpoint-tmp*/"):
                    shutil.rmtree(left)  # unfinished: its process died
            write_whole(folder / RUN, msgspec.json.encode(seal(run)))
        processes.barrier()
        with translate_read_errors(folder, "move it away", kind=CheckpointError):
            require_regular(folder)
        with closing(Checkpoints(folder, keep)) as checkpoints:
            yield checkpoints


class Checkpoints:
    """A folder of checkpoints, open for writing. Use `opened`."""

    def __init__(self, folder: Path, keep: int) -> None:
        # This import takes seconds, which only runs with checkpoints need.
        import orbax.checkpoint as ocp

        self._ocp, self._folder = ocp, folder
        self.newest: int | None = None  #: step that this process wrote or restored
        kept = ocp.CheckpointManagerOptions(max_to_keep=keep or None, lightweight_initialize=True)
        # orbax needs absolute paths.
        self._manager = ocp.CheckpointManager(folder.absolute(), options=kept, item_names=("state", "facts"))
        # All processes must call JAX's function equally often (`processes`); calls of orbax would disturb that.
        self._manager.reached_preemption = lambda step: False

    def rehearse(self, state: TrainState) -> None:
        """Write and remove the state once, so that programs for writing are compiled before the clock starts."""
        scratch = self._folder.absolute() / "rehearsal"
        described(state)
        with self._errors_reported("a rehearsal"):
            with self._ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(scratch, named(state), force=True)
            processes.barrier()
            if processes.is_first():
                shutil.rmtree(scratch)

    def save(self, state: TrainState, facts: CheckpointFacts) -> None:
        """Copy the state and write it in the background; raise CheckpointError if this or the previous write failed."""
        ocp = self._ocp
        sealed = ocp.args.JsonSave(seal(msgspec.json.encode(facts)))
        args = ocp.args.Composite(state=ocp.args.StandardSave(named(state)), facts=sealed)
        faults.point("save")
        with jax.transfer_guard("allow"), self._errors_reported(f"step {facts.step} or the one before"):
            self._manager.save(facts.step, args=args, force=True)
        faults.point("saving")
        self.newest = facts.step

    def restore(
        self, program: Program, config_sha256: str, say: Callable[[str], None]
    ) -> tuple[TrainState, CheckpointFacts]:
        """Restore the newest whole checkpoint. Rename newer ones, which are damaged, and `say` so.

        Raise CheckpointError if there is none, it belongs to another run, or a read fails for another reason.
        """
        wanted = named(program.state)

        def read(step: int) -> tuple[dict[str, jax.Array], CheckpointFacts]:
            facts = read_facts(self._folder, step)
            arrays = read_arrays(self._folder, facts, wanted)
            if facts.config_sha256 == config_sha256:
                return arrays, facts
            why = "of a run with another config; resume it with its own settings"
            raise CheckpointError(f"{self._folder / str(step)}: {why}")

        (arrays, facts), damaged = newest_whole(self._folder, steps_in(self._folder), read)
        self._set_aside(damaged, say)
        self.newest = facts.step
        return jax.tree.unflatten(jax.tree.structure(program.state), arrays.values()), facts

    def _set_aside(self, damaged: dict[int, "Damaged"], say: Callable[[str], None]) -> None:
        """Rename damaged checkpoints, once another one is known to be whole."""
        for step, damage in damaged.items():
            aside = self._folder / f"{step}.damaged"
            while aside.exists():
                aside = aside.with_name(f"{aside.name}+")
            processes.barrier()
            if processes.is_first():
                give_name(self._folder / str(step), aside)
            processes.barrier()
            say(f"checkpoint {step} is damaged ({damage}); kept as {aside.name}; the one before it is used")
        if damaged:
            self._manager.reload()

    def settle(self) -> None:
        """Wait until everything is durable; raise CheckpointError if something could not be written."""
        with self._errors_reported("the last one"):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Call `settle`, then close the folder for writing."""
        # The manager's `close` raises the error again.
        with self._errors_reported("the last one"), closing(self._manager):
            self.settle()

    @contextmanager
    def _errors_reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore raises ValueError for a full disk
            reason = str(error).partition("\n")[0][:200]
            hint = "older ones are whole; free the disk, and continue with --resume"
            raise CheckpointError(f"{self._folder}: {what} cannot be written: {reason}; {hint}") from None


class Damaged(Exception):
    """A checkpoint is not what was written."""


_GONE = FileNotFoundError, NotADirectoryError, IsADirectoryError
#: Statuses of tensorstore for files that are cut, missing or garbled. Others concern disks, limits and memory.
_DAMAGE = {"DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}


@contextmanager
def raise_damaged(checkpoint: Path) -> Iterator[None]:
    """Turn errors of orbax and tensorstore into one line: `Damaged` if files are cut, missing or garbled.

    For any other cause, raise CheckpointError: the files may be whole.
    """
    try:
        require_regular(checkpoint)
        yield
    except Exception as error:  # noqa: BLE001 - orbax raises this class, with 60 lines of text
        cause = error.__cause__ or error
        said = str(cause).strip()
        status = re.match("([A-Z_]+): ", said)
        of_machine = isinstance(cause, OSError | MemoryError | jax.errors.JaxRuntimeError)
        is_damage = not of_machine or isinstance(cause, _GONE)
        said = said.partition("\n")[0].partition(" [")[0] or type(cause).__name__
        said = said if len(said) < 160 else f"{said[:60]} ... {said[-90:]}"
        if is_damage and (not status or status[1] in _DAMAGE):
            raise Damaged(said) from None
        hint = "it is kept; fix this, then try again"
        raise CheckpointError(f"{checkpoint}: cannot be read: {said}; {hint}") from None
