"""A job for a cluster, checked before anything is printed."""

import re
from dataclasses import dataclass
from pathlib import Path

from speedrun.ground.errors import UsageError
from speedrun.ground.track import Track

#: Process 0 listens here, unless the cluster chooses a port.
PORT = 12355

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:/-]*")
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_IMAGE = re.compile(r"[A-Za-z0-9_/.][A-Za-z0-9_.:/@#+-]*")
_BUCKET = re.compile(r"[a-z][a-z0-9]*://[A-Za-z0-9_.-]+(/[A-Za-z0-9_.=-]+)*/?")


@dataclass(frozen=True)
class Job:
    """One run or batch, and its machines.

    Raises:
        UsageError: for values that no cluster accepts, or that could change the structure of a file.
    """

    track: Track
    name: str  #: of the job and of the record's folder
    nodes: int
    gpus: int  #: per node
    words: tuple[str, ...]  #: `speedrun run ...` or `speedrun batch ...`, without folders
    time_s: int  #: time limit
    out: str  #: the record is copied into this folder
    data: str = ""  #: folder of shards; empty: each node makes or fetches them
    stage: str = ""  #: a folder on each node's own disk
    checkout: str = ""  #: this code, on each node
    image: str = ""  #: a container with `speedrun`; empty: use the checkout
    partition: str = ""  #: SLURM
    account: str = ""  #: SLURM
    namespace: str = ""  #: Kubernetes
    claim: str = ""  #: Kubernetes: a PersistentVolumeClaim with data and out
    gpu: str = "h100"  #: kind of device, a key of `devices.DEVICES`
    cloud: str = ""  #: SkyPilot
    price: float | None = None  #: SkyPilot: most dollars per node and hour
    hosts: tuple[str, ...] = ()  #: for ssh; process 0 runs on the first

    def __post_init__(self) -> None:
        texts = {key: value for key, value in vars(self).items() if isinstance(value, str)}
        texts |= {"after --": " ".join(self.words), "hosts": "".join(self.hosts)}
        for key, value in texts.items():
            if not value.isprintable():
                raise UsageError(
                    f"{_flag(key)} {value!r} holds a line break or control character; need plain text"
                )
        _need(_NAME, "name", self.name, "small letters, digits and dashes, at most 40, as in my-run-2")
        for key in ("partition", "account", "namespace", "claim", "cloud"):
            _need(_WORD, key, getattr(self, key), "letters, digits and any of _.,:/-")
        _need(_IMAGE, "image", self.image, "one as in registry/project/speedrun:tag")
        for host in self.hosts:
            _need(
                _HOST, "hosts", host, "names or addresses with commas between them, as in me@node1,me@node2"
            )
        for key in ("data", "out", "stage", "checkout"):
            place = getattr(self, key)
            if place and not (Path(place).is_absolute() or is_bucket(place)):
                raise UsageError(
                    f"{_flag(key)} {place}; a job starts elsewhere: need a path that begins with /"
                )

    @property
    def is_ranked(self) -> bool:
        """Whether its record can be ranked: one node, with the devices of the track."""
        rules = self.track.rules
        return rules.ranked and self.nodes == 1 and self.gpus == rules.num_devices

    @property
    def shards(self) -> list[str]:
        """Shards to copy: names if the track lists them, else shell patterns."""
        data = self.track.data
        return sorted(data.sha256) or [data.val, data.train]


def is_bucket(place: str) -> bool:
    """Whether this is an address of cloud storage, not a path."""
    return _BUCKET.fullmatch(place) is not None


def clock_time(seconds: int) -> str:
    """Format seconds as H:MM:SS."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _need(form: re.Pattern[str], key: str, value: str, need: str) -> None:
    if value and not form.fullmatch(value):
        raise UsageError(f"{_flag(key)} {value!r}; need {need}")


def _flag(key: str) -> str:
    return "the command" if key == "after --" else f"--{key}"
