"""Closed or full standard output, locales, and whose error it was."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typed import speedrun

from speedrun.base import output
from speedrun.base.errors import UsageError
from speedrun.base.sourcefile import IMPORTED

ROOT = Path(__file__).parents[2]
SPEEDRUN = [sys.executable, "-m", "speedrun"]

COMMANDS = {"help": ["--help"], "lines": ["data", "list"], "JSON": ["data", "list", "--json"]}


def ended(argv: list[str], redirection: str) -> tuple[int, str]:
    """Exit code and stderr of a command whose output is redirected."""
    shell = ["bash", "-c", f'"$@" {redirection}', "bash", *SPEEDRUN, *argv]
    done = subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, timeout=600)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("name", "redirection"), [("help", ">&-"), ("lines", "> >(true)"), ("JSON", "<&- >&-")]
)
def test_nobody_has_to_read_what_a_command_says_and_a_full_disk_is_one_line(name, redirection):
    assert ended(COMMANDS[name], redirection) == (0, "")
    code, errors = ended(COMMANDS[name], ">/dev/full")
    assert code == UsageError.exit_code
    assert errors.startswith("error: standard output: No space left on device; ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [("UsageError", 2), ("ZeroDivisionError", 1)])
def test_a_thread_that_never_ends_does_not_hold_a_child_with_an_error(error, code):
    lines = (
        "import threading, time",
        "from speedrun.base.errors import UsageError",
        "from speedrun.base.output import reported",
        "with reported():",
        "    threading.Thread(target=time.sleep, args=(1e5,)).start()",
        f"    raise {error}('told')",
    )
    argv = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, "told" in done.stderr) == (code, True)


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


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        (b"gr\xf6\xdfer", b"", "'gr\\udcf6\\udcdfer'"),
        (b"x", b"gr\xf6n", "SPEEDRUN_DATA='gr\\udcf6n'"),
    ],
)
def test_a_word_or_a_variable_that_is_no_utf8_is_refused(word, value, said):
    env = {**os.environb, b"SPEEDRUN_DATA": value}
    done = subprocess.run([*SPEEDRUN, "validate", word], env=env, capture_output=True, check=False)
    assert done.returncode == UsageError.exit_code
    assert done.stderr.startswith(f"error: {said} is not UTF-8; ".encode())
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [("Terminated('stopped')", 75, "error: stopped\n"), ("KeyboardInterrupt", 130, "")],
    ids=["once", "twice"],
)
def test_who_was_stopped_does_not_wait_for_what_python_ends(raised, code, said):
    """At Python's end, XLA's client would wait for every program that it compiles."""
    script = f"""
import os
from speedrun.base.errors import Terminated
from speedrun.base.output import reported
class Client:
    def __del__(self): os.write(2, b"waited")
client = Client()
with reported():
    print("said", end="")
    raise {raised}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "said", said)


def raised(code: str, path: Path) -> BaseException:
    try:
        exec(compile(code, str(path), "exec"), {})
    except BaseException as error:  # noqa: BLE001 - any is what the test is about
        return error
    raise AssertionError("raised nothing")


UNSPEAKABLE = """
class Mine(Exception):
    def __str__(self): raise SystemExit(0)
raise Mine
"""
OURS = """
from speedrun.base.errors import {name} as Theirs
class Mine(Theirs): exit_code = 0
raise Mine('said')
"""
#: What a recipe may raise in place of an error, and how the line begins that tells it.
ODD = {
    "import sys; sys.exit(0)": "SystemExit: 0; ",
    "raise GeneratorExit": "GeneratorExit: ; ",
    "import asyncio; raise asyncio.CancelledError('x')": "CancelledError: x; ",
    "raise BrokenPipeError(32, 'x')": "BrokenPipeError: [Errno 32] x; ",
    "raise ValueError('a\\n\\udc80')": "ValueError: a \\udc80; ",
    UNSPEAKABLE: "Mine: <exception str() failed>; ",
    **{OURS.format(name=name): "Mine: said; " for name in ("DataError", "Terminated", "NonFiniteError")},
    OURS.format(name="UsageError"): "said",
    "\nnonsense": "NameError: name 'nonsense' is not defined; raised at {}:2; ",
    "x = (": "SyntaxError: '(' was never closed (mine.py, line 1); raised at {}:1; ",
    "raise RuntimeError('INTERNAL: Out of memory allocating 9 bytes.')": "out of memory: INTERNAL: ",
    "raise RuntimeError('RESOURCE_EXHAUSTED: of 9 bytes')": "out of memory: RESOURCE_EXHAUSTED: of 9",
    "raise ImportError('x.so: failed to map segment from shared object')": "out of memory: x.so: failed to map",
}


@pytest.mark.parametrize(
    ("code", "place", "said"),
    [
        ("1 / 0", "science/nn.py", "ZeroDivisionError: division by zero; raised at {}:1; "),
        ("raise MemoryError", "train/run.py", "out of memory: nothing left; "),
        *((code, "recipes/mine.py", said) for code, said in ODD.items()),
    ],
)
def test_an_error_of_a_recipe_names_its_line(code, place, said):
    error = output.expected(raised(code, ROOT / "speedrun" / place))
    assert type(error) is UsageError
    assert error.exit_code == 2
    assert str(error).startswith(said.format(f"speedrun/{place}"))
    assert "\n" not in str(error)


def test_an_error_inside_a_package_names_both_places_and_blames_none(monkeypatch):
    mine = ROOT / "mine.py"
    monkeypatch.setitem(IMPORTED, str(mine), "")
    said = str(output.expected(raised("import json\n\njson.loads('x')", mine)))
    assert re.search(r"; raised at \S*json/decoder\.py:\d+, called from your recipe at \S*mine\.py:3; ", said)
    limit = "from dataclasses import replace\nfrom speedrun.recipes.smoke import RECIPE\n"
    limit += "replace(RECIPE, eval_sequences=0)"
    assert f"called from your recipe at {mine}:3; " in str(output.expected(raised(limit, mine)))
    shape = "from speedrun.science.params import ParamSpec\n\nParamSpec()"
    assert f"raised at {mine}:3; " in str(output.expected(raised(shape, mine)))


@pytest.mark.parametrize("place", ["speedrun/train/run.py", "tests/models/mine.py"])
def test_a_fault_of_ours_keeps_its_traceback(place):
    assert output.expected(raised("1 / 0", ROOT / place)) is None
    assert output.expected(raised("exit()", ROOT / place)) is None
    assert output.expected(KeyboardInterrupt()) is None


def test_debug_shows_the_traceback_of_any_error(tmp_path):
    done = speedrun("--debug", "validate", tmp_path)
    assert done.returncode == UsageError.exit_code
    assert "Traceback (most recent call last):" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}")
