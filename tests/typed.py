"""What tests type: a command of ours in this process, or in one of its own; and programs that stand in for others."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from speedrun import cli


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli.command, [*map(str, words)], prog_name="speedrun")


def speedrun(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "speedrun", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **more)


def as_words(settings: Mapping[str, object]) -> list[str]:
    """Settings of a recipe, as `--set` takes them."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def program(path: Path, text: str) -> Path:
    """A file that can be executed, in a folder that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
