"""What the log of a run tells a tool that draws curves: step, name and number, and when."""

from datetime import datetime

from speedrun.ground import runlog
from speedrun.ledger.run import loss_of


def scalars(event: runlog.AnyEvent) -> list[tuple[int, str, float]]:
    """Steps done, name and number of everything an event tells."""
    match event:
        case runlog.Val():
            return [(event.step, "val/loss", loss_of(event))]
        case runlog.Step():
            done = event.step + 1
            return [
                (done, "train/loss", event.loss),
                (done, "train/time_s", event.train_time_s),
                (done, "train/tokens", float(event.tokens_seen)),
                (done, "train/lr_scale", event.lr_scale),
            ]
    return []


def utc(line: runlog.Line) -> datetime:
    """When a line was written."""
    return datetime.fromisoformat(line.t_utc)


def utc_s(line: runlog.Line) -> float:
    """The same as seconds since 1970."""
    return utc(line).timestamp()
