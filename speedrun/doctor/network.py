"""Whether the hub that data comes from answers. Offline is worth a note: with the data here, no run needs it."""

import threading

from speedrun.data import hub
from speedrun.doctor.check import Check

_ANSWER_S = 4.0  #: with finding its address; more patience is for those who fetch


class Question:
    """Asked in the background, since a network that is not there can take its time to say so."""

    def __init__(self) -> None:
        self._problem: str | None = f"no answer in {_ANSWER_S:.0f} s"
        # As a daemon: the program need not wait for a resolver that hangs.
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
        """Waits for the answer, if it has not come yet."""
        self._thread.join(_ANSWER_S)
        problem = self._problem
        if problem is None:
            return Check("hub", "answers", ok=True, needed=False)
        found = f"{problem}; data that is not here cannot be fetched: HF_ENDPOINT names a mirror"
        return Check("hub", found, ok=False, needed=False)
