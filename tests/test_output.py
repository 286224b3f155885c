"""Standard output that nobody reads or that is full, a locale that holds no record, and whose error it was."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speedrun.ground import output
from speedrun.ground.errors import UsageError

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "records" / "smoke-cpu" / "2026-11-21-first"
SPEEDRUN = [sys.executable, "-m", "speedrun"]

COMMANDS = {"help": ["--help"], "lines": ["data", "list"], "JSON": ["data", "list", "--json"]}


def ended(argv: list[str], redirection: str) -> tuple[int, str]:
    """Exit code of a command whose standard output goes elsewhere, and what it said of errors."""
    shell = ["bash", "-c", f'"$@" {redirection}', "bash", *SPEEDRUN, *argv]
    done = subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_a_full_disk_for_standard_output_is_one_line(argv: list[str]):
    code, errors = ended(argv, ">/dev/full")
    assert code == UsageError.exit_code
    assert errors.startswith("error: standard output: No space left on device; ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "redirection", ["> >(true)", ">&-", "<&- >&-"], ids=["reader left", "closed", "both"]
)
@pytest.mark.parametrize("argv", COMMANDS.values(), ids=COMMANDS)
def test_nobody_has_to_read_what_a_command_says(argv: list[str], redirection: str):
    assert ended(argv, redirection) == (0, "")


def test_an_error_keeps_its_code_where_nothing_can_be_said():
    assert ended(["nonsense"], ">/dev/full 2>/dev/full") == (UsageError.exit_code, "")
    assert ended(["nonsense"], ">&- 2>&-") == (UsageError.exit_code, "")


def test_a_stream_drops_what_it_cannot_write_and_escapes_what_it_cannot_spell():
    reader, writer = os.pipe()
    stream = output.unfailing(writer, "ascii")
    stream.write("größer\n")
    stream.flush()
    assert os.read(reader, 99) == b"gr\\xf6\\xdfer\n"
    os.close(reader)
    stream.write("x" * 100_000)
    stream.flush()
    os.close(writer)


def test_a_title_that_the_locale_cannot_hold(tmp_path: Path):
    record = shutil.copytree(RECORD, tmp_path / "gr\u00f6\u00dfer")
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = [*SPEEDRUN, "describe", str(record), "--title", "noch größer"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert done.stdout.decode() == f"record  {record}\n"
    assert "noch größer" in (record / "README.md").read_text("utf-8")


def test_a_word_that_is_no_utf8_is_refused():
    done = subprocess.run([*SPEEDRUN, "describe", b"gr\xf6\xdfer"], capture_output=True, check=False)
    assert done.returncode == UsageError.exit_code
    assert done.stderr.startswith(b"error: 'gr\\udcf6\\udcdfer' is not UTF-8; ")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [("Terminated('stopped')", 75, "error: stopped\n"), ("KeyboardInterrupt", 130, "")],
    ids=["once", "twice"],
)
def test_who_was_stopped_does_not_wait_for_what_python_ends(raised: str, code: int, said: str):
    """XLA's client is dropped at Python's end, and waits there for every program that it compiles."""
    script = f"""
import os
from speedrun.ground.errors import Terminated
from speedrun.ground.output import reported
class Client:
    def __del__(self): os.write(2, b"waited")
client = Client()
with reported():
    print("said", end="")
    raise {raised}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "said", said)


@pytest.mark.parametrize("name", ["SPEEDRUN_DATA", "XLA_FLAGS"])
def test_a_variable_that_is_no_utf8_is_refused(name: str):
    env = {**os.environb, name.encode(): b"gr\xf6n"}
    done = subprocess.run([*SPEEDRUN, "data", "list"], env=env, capture_output=True, check=False)
    assert done.returncode == UsageError.exit_code
    assert done.stderr.startswith(f"error: {name}='gr\\udcf6n' is not UTF-8; ".encode())
    assert done.stderr.count(b"\n") == 1


# --- whose error it was -----------------------------------------------------------------------------------


def raised(code: str, path: Path) -> Exception:
    """What the text of a file raises."""
    try:
        exec(compile(code, str(path), "exec"), {})
    except Exception as error:  # noqa: BLE001 - any is what the test is about
        return error
    raise AssertionError("raised nothing")


SHAPES = "import numpy as np\n\nnp.ones((2, 3)) @ np.ones((2, 3))\n"


@pytest.mark.parametrize(
    ("code", "place", "said"),
    [
        (SHAPES, "science/models/mine.py", "speedrun/science/models/mine.py:3: ValueError: matmul: "),
        (
            "\nnonsense",
            "science/recipes/mine.py",
            "speedrun/science/recipes/mine.py:2: NameError: name 'nonsense' is not defined; ",
        ),
        ("x = (", "science/recipes/mine.py", "speedrun/science/recipes/mine.py:1: SyntaxError: "),
        ("1 / 0", "science/nn.py", "speedrun/science/nn.py:1: ZeroDivisionError: division by zero; "),
        (
            "raise RuntimeError('INTERNAL: Out of memory allocating 9 bytes.')",
            "x.py",
            "out of memory: INTERNAL: ",
        ),
        ("raise MemoryError", "training/loop.py", "out of memory: no more to be had; "),
        (
            "raise RuntimeError('RESOURCE_EXHAUSTED: of 9 bytes')",
            "x.py",
            "out of memory: RESOURCE_EXHAUSTED: of 9",
        ),
    ],
)
def test_an_error_of_a_recipe_names_its_line(code: str, place: str, said: str):
    error = output.expected(raised(code, ROOT / "speedrun" / place))
    assert isinstance(error, UsageError)
    assert str(error).startswith(said)
    assert "\n" not in str(error)


@pytest.mark.parametrize("place", ["speedrun/training/loop.py", "tests/models/mine.py"])
def test_a_fault_of_ours_keeps_its_traceback(place: str):
    assert output.expected(raised("1 / 0", ROOT / place)) is None
    assert output.expected(KeyboardInterrupt()) is None
