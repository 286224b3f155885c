"""A connection to Ray, on this machine or on several. Only this module imports it.

Ray listens on all interfaces and obeys whoever has its token, so there always is one: docs/islands.md.
"""

import importlib
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speedrun.base import provenance
from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.base.sourcefile import RECIPES_VARIABLE

TOKEN = "RAY_AUTH_TOKEN"
#: Read when ray is imported, and by the processes that it starts.
_SETTINGS = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
#: Variables that other nodes take over.
_SENT = (RECIPES_VARIABLE, "SPEEDRUN_DATA", *(name for name in provenance.VARIABLES if "VISIBLE" not in name))
_ANSWER_S = 10.0  #: of the head


@contextmanager
def connected(address: str | None, number: int = 1) -> Iterator[Any]:
    """Connect to the Ray at `address`, or start one of our own with a number of processors, which ends with the block.

    Yield the package. Connect before JAX is imported: Ray forks, and JAX forbids it.
    """
    if address is not None:
        _require(address)
    os.environ.setdefault(TOKEN, secrets.token_hex(32))
    os.environ.update(_SETTINGS)
    try:
        ray: Any = importlib.import_module("ray")  # pyright cannot find it in most environments
    except ImportError:
        raise UsageError("this needs Ray, which is missing; type: scripts/install.sh islands") from None
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": "critical"}
    same = {name: os.environ[name] for name in _SENT if name in os.environ}
    given["runtime_env"] = {"env_vars": {"SPEEDRUN_DATA": str(Path("data").absolute()), **same}}
    if address is None:
        given |= {"num_cpus": number, "include_dashboard": False}
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", **given)
    except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError) as error:
        hint = (
            f"${TOKEN} or the version may differ from the head's" if address else "free ports, and try again"
        )
        raise UsageError(f"Ray at {address or 'this machine'}: {reason(error)}; {hint}") from None
    signal.signal(signal.SIGTERM, ours)  # Ray's would end us with another code
    ray._private.worker.print_to_stdstream = lambda *_, **__: None  # it would colour our standard output
    try:
        yield ray
    finally:
        ray.shutdown()


def reason(error: Exception) -> str:
    """Return the sentence of an error that has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1].partition(". ")[0].partition(" Worker exit")[0]


def require_head(address: str) -> None:
    """Raise SpeedrunError if nothing listens at `address` any more: Ray would end this process in a minute."""
    if gone := _unreachable(address):
        raise SpeedrunError(f"the head of Ray at {address} is gone ({gone}); start it again, and --resume")


def _require(address: str) -> None:
    """Raise UsageError unless there is a token, and something listens: Ray would try for minutes."""
    if not os.environ.get(TOKEN):
        raise UsageError(f"Ray at {address}: ${TOKEN} is not set; set it to the token of that Ray")
    if why := _unreachable(address):
        hint = "start it there with 'ray start --head --port=PORT', and the same token"
        raise UsageError(f"Ray at {address}: it does not answer ({why}); {hint}")


def _unreachable(address: str) -> str:
    """Return why nothing listens there, or nothing."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    return ""
