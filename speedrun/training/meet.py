"""How the processes of a run find each other, and how they part.

    --coordinator HOST:PORT --processes N --process I      given to each of them; in a pod of an indexed job of
                                                           Kubernetes without the last one
    as tasks of SLURM or Open MPI                          JAX finds out the rest

`speedrun run` takes these, and so does `python -m speedrun.training.train CONFIG.json`, which makes one process:

    python -m speedrun.training.meet CONFIG.json --coordinator HOST:PORT --processes N --process I
"""

import argparse
import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedrun.ground import processes, signals
from speedrun.ground.errors import INTERRUPTED, SpeedrunError, Terminated, UsageError
from speedrun.ground.output import lasting, told

HEARTBEAT_S = 100  #: without one, a process counts as lost
MEET_S = 300  #: for all of them to be there
_LEAVE_S = 10  #: for all to come to the same end of a run that broke off

#: What says that a cluster started us as one of several: name, a variable that only it sets, and their number.
_CLUSTERS = (
    ("SLURM", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"),
)


@dataclass(frozen=True)
class Group:
    """The processes of a run, and which of them this one is."""

    count: int
    index: int = 0
    coordinator: str = ""  #: HOST:PORT of process 0; empty: JAX asks the cluster
    told_by: str = "flags"
    heartbeat_s: int = HEARTBEAT_S
    meet_s: int = MEET_S


def asked(
    coordinator: str | None,
    num_processes: int | None,
    process: int | None,
    heartbeat_s: int = HEARTBEAT_S,
    meet_s: int = MEET_S,
) -> Group | None:
    """The group that flags or, without them, the environment put this process in; None: it is by itself.

    Raises:
        UsageError: for flags that do not belong together.
    """
    told_by = "flags"
    if coordinator and process is None and (pod := os.environ.get("JOB_COMPLETION_INDEX", "")).isdigit():
        process, told_by = int(pod), "flags and Kubernetes"
    flags = {"--coordinator": coordinator, "--processes": num_processes, "--process": process}
    if missing := [name for name, value in flags.items() if value is None]:
        if len(missing) < len(flags):
            raise UsageError(
                f"{', '.join(missing)} missing; need {', '.join(flags)} together, or none of them"
            )
        for name, sign, number in _CLUSTERS:
            if sign in os.environ and (found := os.environ.get(number, "")).isdigit() and int(found) > 1:
                return Group(int(found), told_by=name, heartbeat_s=heartbeat_s, meet_s=meet_s)
        return None
    assert coordinator is not None
    assert num_processes is not None
    assert process is not None
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdigit() and int(port) < 2**16):
        raise UsageError(f"--coordinator {coordinator}; need HOST:PORT of process 0, as in node1:12345")
    if not 0 <= process < num_processes:
        raise UsageError(f"--process {process} of {num_processes}; need one from 0 to {num_processes - 1}")
    return (
        Group(num_processes, process, coordinator, told_by, heartbeat_s, meet_s)
        if num_processes > 1
        else None
    )


@contextlib.contextmanager
def joined(group: Group | None) -> Iterator[None]:
    """Inside the block this process is one of the group; at its end, all leave together.

    Of an error that all of them have only process 0 tells. One that has it alone cannot wait for the others, which
    wait for it: it says so and exits at once.

    Args:
        group: None changes nothing.

    Raises:
        UsageError: if the address cannot be used, or nodes have not as many processes each, one after the other, or
            processes were told of other numbers of them. If the others do not come in time, it ends with its code.
    """
    if group is None:
        yield
        return
    _meet(group)
    try:
        processes.are(processes.count(), processes.index(), num_nodes(_machines(group.meet_s)))
        yield
        processes.barrier()
    except BaseException as error:
        if not _all_come_to_the_end():
            _leave_alone(error)
        _leave()
        if processes.is_first():
            raise
        sys.exit(_exit_code(error))
    _leave()


def _meet(group: Group) -> None:
    import jax
    from jax._src import distributed

    host, _, port = group.coordinator.rpartition(":")
    is_local = host in ("127.0.0.1", "localhost")
    given: dict[str, Any] = {}
    if group.coordinator:
        given = {
            "coordinator_address": group.coordinator,
            "num_processes": group.count,
            "process_id": group.index,
            "cluster_detection_method": "deactivate",
            # Whoever reaches the port could join or end the run: where nobody else has to, nobody can.
            "coordinator_bind_address": group.coordinator if is_local else None,
        }
        if group.index == 0:
            _check_port(host if is_local else "", int(port), group)
    elif _is_alone_on_node():
        given = {"local_device_ids": _all_gpus()}  # JAX would give one to each task
    _quiet_gloo()
    # JAX's client ends the process with a page of C++ where it has waited too long: we are faster.
    impatient = threading.Timer(group.meet_s, _give_up, [group])
    impatient.daemon = True
    impatient.start()
    with signals.handled_by(signal.SIG_DFL, signal.SIGINT):  # Python would not hear of it in there
        jax.distributed.initialize(
            **given,
            initialization_timeout=group.meet_s + 60,
            heartbeat_timeout_seconds=group.heartbeat_s,
        )
    impatient.cancel()
    if not group.coordinator and distributed.global_state.process_id == 0:
        sys.stderr.write(f"{distributed.global_state.num_processes} processes, told by {group.told_by}\n")
    processes.are(distributed.global_state.num_processes, distributed.global_state.process_id)


def _machines(patience_s: int) -> list[str]:
    """What each process runs on, as NCCL tells machines apart: containers with names of their own are several.

    Raises:
        UsageError: if another process was told of another number of them.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    boot_id = path.read_text().strip() if path.exists() else ""
    service, key, count = processes.client(), "speedrun machine", processes.count()
    service.key_value_set(f"{key}/{processes.index()}", f"{count} {socket.gethostname()} {boot_id}")
    found = []
    for i in range(count):
        theirs, _, machine = service.blocking_key_value_get(f"{key}/{i}", patience_s * 1000).partition(" ")
        if int(theirs) != count:
            raise UsageError(
                f"--processes {count} in process {processes.index()} and {theirs} in process {i}; need one number for "
                "all; start them again with it"
            )
        found.append(machine)
    return found


def num_nodes(machines: list[str]) -> int:
    """Of the machine of each process, in their order: how many there are.

    Raises:
        UsageError: if those of one machine do not follow one another, or one has more than another: a replica would
            reach over the network.
    """
    runs = [(name, len([*same])) for name, same in itertools.groupby(machines)]
    if len(runs) != len(set(machines)) or len({length for _, length in runs}) > 1:
        found = ", ".join(f"{length} on {name.split()[0]}" for name, length in runs)
        raise UsageError(
            f"processes in their order: {found}; need as many on each node, and those of a node one after the other; "
            "number them by node (SLURM: --distribution=block)"
        )
    return len(runs)


def _check_port(host: str, port: int, group: Group) -> None:
    """JAX's service crashes where it cannot have its port."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UsageError(
            f"process 0 cannot listen on {group.coordinator}: {os.strerror(error.errno or 0)}; need a free port of its "
            "own machine; pass another --coordinator to all"
        ) from None


def _give_up(group: Group) -> None:
    where = group.coordinator or f"the address that {group.told_by} gave"
    sys.stderr.write(
        f"process {group.index}: error: not all {group.count} processes met at {where} within {group.meet_s} s; "
        "process 0 must run there, and all must be started; look for those that are missing, or pass a longer "
        "--meet-within\n"
    )
    sys.stderr.flush()
    os._exit(UsageError.exit_code)


def _is_alone_on_node() -> bool:
    """Whether the cluster started one task on each node: it has all GPUs there."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    return tasks.partition("(")[0] == "1"


def _all_gpus() -> list[int] | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return list(range(len(nodes if visible is None else visible.split(",")))) if nodes else None


def _quiet_gloo() -> None:
    """What gloo tells the standard output of every connection is dropped; what Python prints goes on through a copy."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.stdout = lasting(kept)


def _all_come_to_the_end() -> bool:
    import jax

    try:
        processes.client().wait_at_barrier("speedrun end", _LEAVE_S * 1000)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _leave() -> None:
    import jax

    jax.distributed.shutdown()


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return getattr(error, "exit_code", SpeedrunError.exit_code)


def _leave_alone(error: BaseException) -> None:
    """Ends this process without the others."""
    is_expected = isinstance(error, SpeedrunError | Terminated | KeyboardInterrupt)
    said = f"{error or 'interrupted'}\n" if is_expected else "".join(traceback.format_exception(error))
    sys.stderr.write(f"process {processes.index()}: error: {said}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_exit_code(error))


def _main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m speedrun.training.meet", allow_abbrev=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--heartbeat", type=int, default=HEARTBEAT_S)
    parser.add_argument("--meet-within", type=int, default=MEET_S)
    found = parser.parse_args(words)
    group = asked(found.coordinator, found.processes, found.process, found.heartbeat, found.meet_within)
    with joined(group):
        from speedrun.data import generated
        from speedrun.ground import console, track
        from speedrun.training.prepare import RunConfig, decoded
        from speedrun.training.train import train

        raw = found.config.read_bytes()
        config = decoded(raw, RunConfig)
        printer = console.Printer(sys.stdout) if processes.is_first() else None
        say = printer.say if printer else lambda _: None
        rules = track.load(config.track)
        processes.agreed(lambda: generated.ensure(rules, config.data, say), lambda _: {})
        train(config, printer)


if __name__ == "__main__":
    with told():
        _main(sys.argv[1:])
