"""Check that the hub for data answers. No run needs it once the data is here, so this is a note."""

import threading

from speedrun.data import hub
from speedrun.doctor.check import Check

_ANSWER_S = 4.0  #: including DNS


class Probe:
    """Asks the hub in the background: an absent network may take long to fail."""

    def __init__(self) -> None:
        self._problem: str | None = f"no answer in {_ANSWER_S:.0f} s"
        # A daemon, so that a hanging resolver does not delay the exit.
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            hub.reach(_ANSWER_S)
        except hub.HubError as error:
            self._problem = str(error)
        else:
            self._problem = None

    def check(self) -> Check:
        """Wait for the answer, and report it."""
        self._thread.join(_ANSWER_S)
        problem = self._problem
        if problem is None:
            return Check("hub", "answers", ok=True, needed=False)
        found = f"{problem}; data that is not here cannot be fetched: HF_ENDPOINT names a mirror"
        return Check("hub", found, ok=False, needed=False)
