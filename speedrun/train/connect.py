"""Connects the processes of a run, and ends them together.

Each process gets `--coordinator`, `--processes` and `--process`; a pod of an indexed Kubernetes job needs no
`--process`, and tasks of SLURM or Open MPI need no flags.
"""

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

from speedrun.base import processes, signals
from speedrun.base.errors import INTERRUPTED, SpeedrunError, Terminated, UsageError
from speedrun.base.output import expected, leave, unfailing

HEARTBEAT_S = 100  #: without a heartbeat, until a process is lost
MEET_S = 300  #: for all processes to connect
_LEAVE_S = 10  #: for all processes to reach the end of a run that crashed

#: Name, a variable that only this cluster sets, and those with the number of processes and the index of this one.
_CLUSTERS = (
    ("SLURM", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("Open MPI", "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)


@dataclass(frozen=True)
class Group:
    """The processes of a run, and the index of this one."""

    count: int
    index: int = 0
    coordinator: str = ""  #: HOST:PORT of process 0; empty: JAX asks the cluster
    found_by: str = "flags"


def find_group(coordinator: str | None, num_processes: int | None, process: int | None) -> Group | None:
    """Return the group of this process from its flags or its environment; None for a single process."""
    found_by = "flags"
    if coordinator and process is None and (pod := os.environ.get("JOB_COMPLETION_INDEX", "")).isdigit():
        process, found_by = int(pod), "flags and Kubernetes"
    if coordinator is None or num_processes is None or process is None:
        flags = {"--coordinator": coordinator, "--processes": num_processes, "--process": process}
        missing = [name for name, value in flags.items() if value is None]
        if len(missing) < len(flags):
            need = f"need {', '.join(flags)} together, or none of them"
            raise UsageError(f"{', '.join(missing)} missing; {need}")
        for name, marker, *numbers in _CLUSTERS:
            tasks, index = (os.environ.get(number, "") for number in numbers)
            if marker in os.environ and tasks.isdigit() and int(tasks) > 1 and index.isdigit():
                return Group(int(tasks), int(index), found_by=name)
        return None
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdigit() and int(port) < 2**16):
        raise UsageError(f"--coordinator {coordinator}; need HOST:PORT of process 0, as in node1:12345")
    if not 0 <= process < num_processes:
        raise UsageError(f"--process {process} of {num_processes}; need one from 0 to {num_processes - 1}")
    return Group(num_processes, process, coordinator, found_by) if num_processes > 1 else None


@contextlib.contextmanager
def joined(group: Group | None, heartbeat_s: int, meet_s: int) -> Iterator[None]:
    """Join the group inside the block; leave it together with the others. None changes nothing.

    Only process 0 reports an error that all processes have. A process that fails alone reports its error and exits at
    once, since the others wait for it. So does one that does not meet the others within `meet_s`.
    """
    if group is None:
        yield
        return
    import jax

    _connect(group, heartbeat_s, meet_s)
    try:
        processes.configure(processes.count(), processes.index(), num_nodes(_machines(meet_s)))
        yield
        processes.barrier()
    except BaseException as error:
        known = expected(error) or error
        is_interrupt = isinstance(error, KeyboardInterrupt)
        exit_code = INTERRUPTED if is_interrupt else getattr(known, "exit_code", SpeedrunError.exit_code)
        if not _all_reach_the_end():
            _exit_alone(known, exit_code)
        jax.distributed.shutdown()
        if processes.is_first():
            raise
        sys.exit(exit_code)
    jax.distributed.shutdown()


def _connect(group: Group, heartbeat_s: int, meet_s: int) -> None:
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
            # Anyone who reaches the port could join or end the run, so bind to this machine if possible.
            "coordinator_bind_address": group.coordinator if is_local else None,
        }
        if group.index == 0:
            _check_port(host if is_local else "", int(port), group)
    elif (gpus := _gpus_of_a_lone_task()) is not None:
        given = {"local_device_ids": gpus}
    _quiet_gloo()
    # After its timeout, JAX's client ends the process with a page of C++.
    timer = threading.Timer(meet_s, _give_up, [group, meet_s])
    timer.daemon = True
    timer.start()
    with signals.handled_by(signal.SIG_DFL, signal.SIGINT):  # Python runs no handler during this call
        given |= {"initialization_timeout": meet_s + 60}
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=heartbeat_s)
    timer.cancel()
    if not group.coordinator and distributed.global_state.process_id == 0:
        sys.stderr.write(f"{distributed.global_state.num_processes} processes, found by {group.found_by}\n")
    processes.configure(distributed.global_state.num_processes, distributed.global_state.process_id)


def _machines(timeout_s: int) -> list[str]:
    """Return the machine of each process as NCCL identifies it: containers with different names differ."""
    path = Path("/proc/sys/kernel/random/boot_id")
    boot_id = path.read_text().strip() if path.exists() else ""
    service, key, count = processes.client(), "speedrun machine", processes.count()
    service.key_value_set(f"{key}/{processes.index()}", f"{count} {socket.gethostname()} {boot_id}")
    found = []
    for i in range(count):
        theirs, _, machine = service.blocking_key_value_get(f"{key}/{i}", timeout_s * 1000).partition(" ")
        if int(theirs) != count:
            told = f"--processes {count} in process {processes.index()} and {theirs} in process {i}"
            raise UsageError(f"{told}; need one number for all; start them again with it")
        found.append(machine)
    return found


def num_nodes(machines: list[str]) -> int:
    """Return the number of machines, given the machine of each process in order.

    Raise UsageError if a replica would span the network: the processes of a machine are not consecutive, or machines
    have different numbers of them.
    """
    runs = [(name, len([*same])) for name, same in itertools.groupby(machines)]
    if len(runs) != len(set(machines)) or len({length for _, length in runs}) > 1:
        found = ", ".join(f"{length} on {name.split()[0]}" for name, length in runs)
        need = "need as many on each node, and those of a node one after the other"
        hint = "number them by node (SLURM: --distribution=block)"
        raise UsageError(f"processes in their order: {found}; {need}; {hint}")
    return len(runs)


def _check_port(host: str, port: int, group: Group) -> None:
    """Check that the port is free, since JAX's service would crash."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        found = f"process 0 cannot listen on {group.coordinator}: {os.strerror(error.errno or 0)}"
        hint = "need a free port of its own machine; pass another --coordinator to all"
        raise UsageError(f"{found}; {hint}") from None


def _give_up(group: Group, meet_s: int) -> None:
    where = group.coordinator or f"the address that {group.found_by} gave"
    sys.stderr.write(
        f"process {group.index}: error: not all {group.count} processes met at {where} within {meet_s} s; "
        "start the missing ones, or pass a longer --meet-within\n"
    )
    leave(UsageError.exit_code)


def _gpus_of_a_lone_task() -> list[int] | None:
    """Return all GPUs of this node if it has a single task, which would get one GPU from JAX; else None."""
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    if tasks.partition("(")[0] != "1" or not nodes:
        return None
    return list(range(len(nodes if visible is None else visible.split(","))))


def _quiet_gloo() -> None:
    """Drop gloo's messages: redirect descriptor 1 to /dev/null, and let Python print to a copy."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.stdout = unfailing(kept)


def _all_reach_the_end() -> bool:
    import jax

    try:
        processes.client().wait_at_barrier("speedrun end", _LEAVE_S * 1000)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _exit_alone(error: BaseException, exit_code: int) -> None:
    """End this process without the others."""
    is_expected = isinstance(error, SpeedrunError | Terminated | KeyboardInterrupt)
    text = f"{error or 'interrupted'}\n" if is_expected else "".join(traceback.format_exception(error))
    sys.stderr.write(f"process {processes.index()}: error: {text}")
    leave(exit_code)
