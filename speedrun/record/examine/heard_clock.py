"""The train time of a run in the sandbox by a clock outside: from when its events are heard."""

from contextlib import suppress
from pathlib import Path

from msgspec import DecodeError

from speedrun.base import runlog
from speedrun.base.clock import Clock
from speedrun.base.errors import SpeedrunError
from speedrun.record.reader import load

#: Between an event and the line that is heard, in all; a busy machine takes a tenth of a second.
_SLACK_S, _SLACK_SHARE = 0.5, 0.01


class HeardClock:
    """Hears the lines that a run prints of its log."""

    def __init__(self) -> None:
        self._clock = Clock()

    def __call__(self, line: bytes) -> None:
        """Start, pause or stop at an event of the clock. A clock that is told to do what it does already goes on."""
        with suppress(DecodeError, RuntimeError):
            match runlog.decode(line).event:
                case runlog.ClockStart() | runlog.ClockResume():
                    self._clock.start(lambda: None)
                case runlog.ClockPause() | runlog.ClockStop():
                    self._clock.stop(lambda: None)
                case _:
                    pass

    def require(self, record: Path) -> None:
        """Raise SpeedrunError if a finished run of a record states another train time."""
        heard_s = self._clock.seconds
        for run in load(record).finished if record.is_dir() else ():
            if abs(run.train_time_s - heard_s) > _SLACK_S + _SLACK_SHARE * heard_s:
                told = f"the run states {run.train_time_s:.3f} s of training, the clock outside of it {heard_s:.3f} s"
                raise SpeedrunError(f"{told}; nothing was judged; look in its source for what reads time")
