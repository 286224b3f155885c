"""A Dockerfile taken apart, and its steps executed in a root folder by `chroot`: what can be tried without an engine.

Knows what ours uses: stages, SHELL, ARG, ENV, COPY of the context, RUN, USER, WORKDIR.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """One instruction."""

    name: str
    text: str


def steps(text: str) -> list[Step]:
    """All instructions, continued lines joined, comments left out."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    lines = (line.strip() for line in joined.splitlines() if line.strip())
    return [Step(*line.split(maxsplit=1)) for line in lines]


def stages(text: str) -> dict[str, list[Step]]:
    """The instructions of each stage, those of the stages that it is built from first."""
    found: dict[str, list[Step]] = {}
    for step in steps(text):
        if step.name == "FROM":
            parent, _, name = step.text.split()
            found[name] = [*found.get(parent, [step])]
        else:
            found[[*found][-1]].append(step)
    return found


def settings(stage: list[Step]) -> dict[str, str]:
    """The environment that ENV leaves behind."""
    return dict(word.split("=", 1) for step in stage if step.name == "ENV" for word in shlex.split(step.text))


def is_in_context(path: str, ignored: str) -> bool:
    """Whether the file of this path is sent to the builder: the last pattern of .dockerignore that fits decides."""
    said = True
    for line in ignored.splitlines():
        pattern = line.removeprefix("!").strip()
        if pattern and not pattern.startswith("#") and _fits(path, pattern):
            said = line.startswith("!")
    return said


def _fits(path: str, pattern: str) -> bool:
    """A pattern fits a path or a folder above it."""
    body = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
    return re.match(rf"{body}(/|$)", path) is not None


def context(folder: Path) -> Iterator[str]:
    """The files of a checkout that are sent, by path."""
    ignored = (folder / ".dockerignore").read_text()
    for top in sorted(folder.iterdir()):
        files = [top] if top.is_file() else top.rglob("*") if is_in_context(top.name, ignored) else []
        for file in files:
            path = file.relative_to(folder).as_posix()
            if file.is_file() and is_in_context(path, ignored):
                yield path


class Root:
    """A folder that stands for the container's file system. Needs to be root."""

    def __init__(self, folder: Path, checkout: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._checkout = folder, checkout
        self._env = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", **environment}
        self._shell, self._user, self._place = ["/bin/sh", "-c"], "0:0", "/"

    def execute(self, step: Step) -> subprocess.CompletedProcess[str] | None:
        """One step as the engine would; None where it runs nothing."""
        match step.name:
            case "SHELL":
                self._shell = json.loads(step.text)
            case "ENV":
                self._env |= settings([step])
            case "ARG":
                name, _, default = step.text.partition("=")
                self._env.setdefault(name, default)
            case "USER":
                self._user = step.text
            case "WORKDIR":
                self._place = step.text
                (self._folder / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(*step.text.split())
            case "RUN":
                return self.run([*self._shell, step.text])
        return None

    def run(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        """A command inside, as the user of the last USER, with /proc and /dev of its own."""
        script = (
            'cd / && mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && '
            'exec chroot --userspec="$2" "$1" /bin/sh -c \'cd "$0" && exec "$@"\' "$3" "${@:4}"'
        )
        outer = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", script, "bash"]
        return subprocess.run(
            [*outer, str(self._folder), self._user, self._place, *argv],
            env=self._env, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def _copy(self, source: str, target: str) -> None:
        prefix = "" if source == "." else f"{source}/"
        for path in context(self._checkout):
            if path.startswith(prefix):
                place = self._folder / target.lstrip("/") / path.removeprefix(prefix)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._checkout / path, place)


def fresh_root(folder: Path, python: Path) -> None:
    """A root like that of python:*-slim-bookworm: Debian's smallest, and a Python of its own in /usr/local."""
    libraries = "libssl3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8,zlib1g"
    asked = ["apt-get", "indextargets", "--format", "$(SITE)"]
    site = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    argv = [
        "debootstrap",
        "--variant=minbase",
        f"--include=ca-certificates,{libraries}",
        "bookworm",
        str(folder),
        site,
    ]
    subprocess.run(argv, check=True, capture_output=True)
    shutil.copytree(python, folder / "usr" / "local", symlinks=True, dirs_exist_ok=True)
    for path in ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
        if os.path.exists(f"/{path}"):
            shutil.copyfile(f"/{path}", folder / path)
