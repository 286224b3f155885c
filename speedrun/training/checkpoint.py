"""Checkpoints: all that a run is after some step, on disk; written by orbax, checked by us.

    RECORD.checkpoints/run.json     what the run was asked to do, and of which source
    RECORD.checkpoints/20/          the state after 20 steps, one array for each packed name, and `Facts`

They lie beside the record, not in it: a record is small and plain. orbax writes in the background and makes a step
appear by one rename, so a process may die at any moment. It keeps no digests and casts a wrong dtype without a word.
So arrays, facts and `run.json` have digests of ours, and dtypes are compared before anything is read.
"""

import gc
import hashlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec

from speedrun.ground import faults, lock, processes
from speedrun.ground.errors import CheckpointError
from speedrun.ground.mesh import fetch
from speedrun.ground.wholefile import write_whole
from speedrun.science.step import TrainState
from speedrun.training.fingerprint import fingerprint
from speedrun.training.program import Program

RUN = "run.json"
_STATE, _FACTS = "state", "facts"


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a state."""

    shape: tuple[int, ...]
    dtype: str
    digest: str  #: 64 bits of `fingerprint`


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run stands, apart from its arrays."""

    step: int  #: steps that are done
    run_id: str
    config_sha256: str
    cursor: tuple[int, int]  #: of the next token: shard and offset
    tokens_seen: int
    train_time_s: float  #: on the ranked clock
    arrays: dict[str, Array]


class Restored(NamedTuple):
    """What a run goes on from."""

    state: TrainState
    facts: Facts


def folder_of(record: Path) -> Path:
    """Where the checkpoints of a record lie."""
    return Path(f"{record.resolve()}.checkpoints")


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a state by flat name: params.embed, opt_state.inner_states.matrix.inner_state.0.momentum..."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def sealed(raw: bytes) -> dict[str, str]:
    """A text with its digest."""
    return {"sha256": hashlib.sha256(raw).hexdigest(), "text": raw.decode()}


def unsealed(found: Any) -> bytes:
    """The text of what `sealed` made.

    Raises:
        ValueError: if it was changed.
    """
    match found:
        case {"sha256": str(digest), "text": str(text)} if sealed(text.encode())["sha256"] == digest:
            return text.encode()
    raise ValueError("its digest does not fit")


def _name(path: tuple[Any, ...]) -> str:
    fields = ("name", "key", "idx")  # of a tuple, a dictionary, a list
    return ".".join(str(getattr(key, next(f for f in fields if hasattr(key, f)))) for key in path)


@jax.jit
def _digests(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: fingerprint(array) for name, array in arrays.items()}


def described(state: TrainState) -> dict[str, Array]:
    """Shape, dtype and digest of every array; the same on any number of devices."""
    arrays = named(state)
    digests = fetch(_digests(arrays))
    return {
        name: Array(array.shape, str(array.dtype), "".join(f"{int(lane):08x}" for lane in digests[name]))
        for name, array in arrays.items()
    }


@cache
def _leave_telling_to_us() -> None:
    """What cannot be written is one line of ours. orbax, and threads of tensorstore, would put 600 before it.

    For the rest of the process: those threads outlive the write that failed.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    tell = sys.unraisablehook

    def hook(told: Any) -> None:
        if "Event loop is closed" not in str(told.exc_value):  # of a write that had failed before
            tell(told)

    sys.unraisablehook = hook


@contextmanager
def opened(folder: Path, run: bytes, *, every: int, keep: int) -> Iterator["Checkpoints"]:
    """The checkpoints of a run, which no other run writes inside the block; at its end all are durable.

    Of several processes, each writes its part; the first one holds the lock and keeps the folder in order.

    Args:
        folder: is made.
        run: the text of `run.json`, for whoever goes on.
        every: steps from one checkpoint to the next.
        keep: how many, the newest ones; 0: all.

    Raises:
        CheckpointError: if another process writes there, or a checkpoint could not be written.
    """
    _leave_telling_to_us()
    with ExitStack() as held:
        if processes.is_first():
            held.enter_context(lock.alone_in(folder, refuse=CheckpointError))
            for left in folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(left)  # its run ended while it was being written
            write_whole(folder / RUN, msgspec.json.encode(sealed(run)))
        processes.barrier()
        checkpoints = Checkpoints(folder, every, keep)
        try:
            yield checkpoints
        finally:
            checkpoints.close()


class Checkpoints:
    """A folder of checkpoints, open for writing. `opened` makes it."""

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        # Some seconds, and the libraries of several clouds: only runs that keep checkpoints pay for it.
        import orbax.checkpoint as ocp

        self._ocp, self._folder, self._every = ocp, folder, every
        self.newest: int | None = None  #: that this process wrote or restored
        options = ocp.CheckpointManagerOptions(max_to_keep=keep or None)
        # orbax takes absolute paths only.
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_names=(_STATE, _FACTS))
        # Whether to stop, only the run asks JAX's service: it counts the questions, and orbax counts otherwise.
        self._manager.reached_preemption = lambda step: False

    @property
    def steps(self) -> list[int]:
        """Those of which there is a checkpoint, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def due(self, step: int) -> bool:
        """Whether one is wanted after so many steps."""
        return step > 0 and step % self._every == 0

    def rehearse(self, state: TrainState) -> None:
        """Writes the state once and removes it: what has to be compiled for that is compiled before the clock."""
        scratch = self._folder.absolute() / "rehearsal"
        described(state)
        with self._told("a rehearsal"):
            with self._ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(scratch, named(state), force=True)
            processes.barrier()
            if processes.is_first():
                shutil.rmtree(scratch)

    def save(self, state: TrainState, facts: Facts) -> None:
        """Copies the state to the host and writes it in the background.

        Raises:
            CheckpointError: if this, or the one before it, could not be written.
        """
        ocp = self._ocp
        args = ocp.args.Composite(
            **{
                _STATE: ocp.args.StandardSave(named(state)),
                _FACTS: ocp.args.JsonSave(sealed(msgspec.json.encode(facts))),
            }
        )
        faults.point("save")
        with jax.transfer_guard("allow"), self._told(f"step {facts.step}"):
            self._manager.save(facts.step, args=args, force=True)
        faults.point("saving")
        self.newest = facts.step

    def restore(self, program: Program, config_sha256: str, say: Callable[[str], None]) -> Restored:
        """The newest checkpoint that is whole. Newer ones that are not are removed.

        Args:
            program: the recipe on the devices on which the state shall lie.
            config_sha256: the run's, as in `Facts`.
            say: receives a line for each checkpoint that is removed.

        Raises:
            CheckpointError: if there is none, or it is of another model or run.
        """
        for step in self.steps:
            try:
                return self._restore(step, program, config_sha256)
            except _Damaged as damage:
                say(f"checkpoint {step} is damaged ({damage}); removed, the one before it is tried")
                self._manager.delete(step)
        raise CheckpointError(
            f"{self._folder}: no whole checkpoint; need one to go on from; start the run again, in a new folder"
        )

    def _restore(self, step: int, program: Program, config_sha256: str) -> Restored:
        facts = self._facts(step)
        if facts.step != step:
            raise _Damaged(f"it holds step {facts.step}")
        abstract = jax.eval_shape(program.init, jax.random.key(0))
        expected = named(abstract)
        _check_fit(facts, expected, config_sha256, self._folder / str(step))
        shardings = named(program.shardings(program.specs))
        wanted = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings[name])
            for name, array in expected.items()
        }
        args = self._ocp.args.Composite(**{_STATE: self._ocp.args.StandardRestore(wanted)})
        with _damage_named():
            found = self._manager.restore(step, args=args)[_STATE]
        state = jax.tree.unflatten(jax.tree.structure(abstract), [found[name] for name in expected])
        for name, array in described(state).items():
            if array.digest != facts.arrays[name].digest:
                raise _Damaged(f"{name} is not what was written")
        self.newest = step
        return Restored(state, facts)

    def _facts(self, step: int) -> Facts:
        args = self._ocp.args.Composite(**{_FACTS: self._ocp.args.JsonRestore()})
        with _damage_named():
            return msgspec.json.decode(unsealed(self._manager.restore(step, args=args)[_FACTS]), type=Facts)

    def settle(self) -> None:
        """Waits until all is durable.

        Raises:
            CheckpointError: if something could not be written.
        """
        with self._told("the last one"):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """`settle`, and then nothing can be written any more."""
        with self._told("the last one"), closing(self._manager):  # which raises once more what `settle` told
            self.settle()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore's word for a full disk is ValueError
            said = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{self._folder}: {what} cannot be written: {said}; those before it are whole; free the disk, "
                "and go on with --resume"
            ) from None


class _Damaged(Exception):
    """A checkpoint that cannot be read, or is not what was written."""


@contextmanager
def _damage_named() -> Iterator[None]:
    """Turns what orbax and tensorstore raise of files that are cut, missing or garbled into one line."""
    said = ""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - orbax raises this very class, with 60 lines of text
        said = str(error).strip().partition("\n")[0][:120]
    if said:
        # What orbax was reading meanwhile is given up by the collector, with as many lines for each array.
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        gc.collect()
        sys.unraisablehook = hook
        raise _Damaged(said)


def _check_fit(facts: Facts, expected: dict[str, Any], config_sha256: str, where: Path) -> None:
    """Refuses the state of another model before anything is cast or cut to fit."""
    for name in {**expected, **facts.arrays}:
        mine, found = expected.get(name), facts.arrays.get(name)
        got = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
        need = "nothing" if mine is None else f"{mine.dtype}{list(mine.shape)}"
        if got != need:
            raise CheckpointError(
                f"{where}: {name} is {got}, this model needs {need}; resume with its own recipe"
            )
    if facts.config_sha256 != config_sha256:
        raise CheckpointError(
            f"{where}: of a run with another config; resume with the settings it began with"
        )
