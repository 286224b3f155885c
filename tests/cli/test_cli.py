"""The command line: fast, helpful, and its errors are one line with the right exit code."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from typed import invoke, is_typed_here

from speedrun import __version__, cli, recipes
from speedrun.base import track
from speedrun.base.errors import DataError, NonFiniteError, SpeedrunError, Terminated, UsageError
from speedrun.base.exit_codes import EXIT_CODES, code_of
from speedrun.base.sourcefile import RECIPES_VARIABLE
from speedrun.cli import train
from speedrun.cli.options import command as cli_command
from speedrun.commands import COMMANDS
from speedrun.science.kernels.dispatch import ATTENTION

RECORD = "records/smoke-cpu/2026-11-29-first"
HEAVY = ("jax", "numpy", "msgspec", "optax", "matplotlib")


def test_help_is_fast_and_imports_nothing_heavy():
    """In time of the processor, which does not depend on what else runs."""
    script = (
        "import atexit, sys; from speedrun.cli import command\n"
        f"atexit.register(lambda: print(','.join(set({HEAVY}) & set(sys.modules)), file=sys.stderr))\n"
        "command(['--help'])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "\n"), "the names of what was imported"
    assert "Train:" in done.stdout
    assert after.ru_utime - before.ru_utime < 0.3


def test_help_says_what_there_is():
    assert all(form in invoke("run", "--help").output for form in ATTENTION)
    shown = invoke("--help").output
    for name in filter(is_typed_here, COMMANDS):
        assert f"\n  {name} " in shown
    for code, meaning in EXIT_CODES.items():
        assert f" {code} {meaning} " in " ".join(shown.split())  # long ones are broken
    assert "Example:" in shown
    assert invoke("--version").output == f"speedrun {__version__}\n"


def commands(of: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    for name in of.list_commands(ctx := click.Context(of)):
        yield (*names, name)
        if isinstance(command := of.get_command(ctx, name), click.Group):
            yield from commands(command, *names, name)


@pytest.mark.parametrize("names", [*commands(cli.command)], ids=" ".join)
def test_every_help_has_an_example(names):
    result = invoke(*names, "--help")
    assert result.exit_code == 0
    assert f"Usage: speedrun {' '.join(names)} " in result.output
    assert f"speedrun {' '.join(names)}" in result.output.partition("Example")[2]


WRONG_WORDS = [
    ("dta", "did you mean 'data'?"),
    ("zzz", f"choose one of: {', '.join(sorted(filter(is_typed_here, COMMANDS)))}"),
    ("data verify --track smoke", "did you mean 'smoke-cpu'?"),
    ("data verify --fall", "did you mean '--full'?"),
    ("run --steps 10", "steps are a setting: --set stages.0.num_steps=10"),
    ("run --set muon_lr=1", "unknown setting 'muon_lr'; did you mean 'optimizer.muon_lr'?"),
    ("run --set table=1", "choose one of: compute_dtype, config."),
    ("run --resume nowhere", "nowhere: no such run; need the folder of one"),
    ("--nothing", "choose one of: --debug, --help, --version"),
    ("run --seed x", "'speedrun run --help' shows what is needed"),
    ("plan --device-kind h1000", "unknown device kind 'h1000'; did you mean 'h100'?"),
    ("plan --device-kind v100", "unknown device kind 'v100'; choose one of"),
    ("plan --device-kind rtx4090", "unknown device kind 'rtx4090'; did you mean '4090'?"),
    ("plan --set stages.0.num_steps=2.5", "num_steps='2.5': need a whole number like 280"),
    ("plan --microbatches 3", "8 sequences in 3 parts on 8 devices do not come out even"),
    ("plan --devices 3", "got 3 devices for a replica, need a divisor of 8"),
]


@pytest.mark.parametrize(("words", "suggestion"), [one for one in WRONG_WORDS if is_typed_here(one[0])])
def test_a_wrong_word_ends_with_what_to_type(words, suggestion):
    assert suggestion in invoke(*words.split()).stderr
    machine = invoke(*words.split(), "--json")
    report = json.loads(machine.stdout)
    assert (report["exit_code"], report["error"].count("\n"), machine.stderr) == (2, 0, "")


WRONG = f"""
data synth --track webmini | plot | reproduce a b | stats nowhere | play | sample nowhere | watch README.md
run --seed -1 | run --seed | run --deadline nap=3 | run --deadline step=x | run --set a
batch --set optimizer.muon_lr=0.04 --dry-run | batch --expect 3.2 --dry-run
batch --track main-8xh100 --expect 3.29 --dry-run
batch --resume nowhere | batch --resume nowhere --runs 9
batch --runs 2 --dollars 2 | run --device-kind h100
eval nowhere --limit 3 | describe {RECORD} | describe {RECORD} --parent docs
sweep --ladder | sweep --ladder --set a=1,2 | sweep --runs 2
sweep --track moon --ladder --runs 2 | sweep --resume nowhere | sweep --runs 2 --set a=1..2
"""


@pytest.mark.parametrize("words", [*filter(is_typed_here, re.split(r" \| |\n", WRONG.strip()))])
def test_wrong_usage_is_one_line_and_ends_with_2(words):
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("names", [(), ("data",)], ids=" ".join)
def test_a_command_of_commands_alone_is_a_question_for_help(names):
    result = invoke(*names)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Usage: {' '.join(['speedrun', *names])} ")
    assert "Example" in result.stderr


@pytest.fixture
def raiser(monkeypatch):

    def install(error: BaseException) -> None:
        @cli_command()
        def command() -> None:
            raise error

        monkeypatch.setattr(train, "run", command)

    return install


SAID = "got; need; do"


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        *(
            (kind(SAID), kind.exit_code, SAID)
            for kind in (SpeedrunError, UsageError, DataError, NonFiniteError)
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated("stopped"), 75, "stopped"),
    ],
)
def test_an_expected_error_is_one_line(raiser, error, exit_code, said):
    raiser(error)
    plain, machine = invoke("run"), invoke("run", "--json")
    ended = "\n" * isinstance(error, KeyboardInterrupt)  # by click: the line of the ^C
    assert (plain.exit_code, plain.stdout, plain.stderr) == (exit_code, "", f"{ended}error: {said}\n")
    assert (machine.exit_code, machine.stderr) == (exit_code, ended)
    assert json.loads(machine.stdout) == {"error": said, "exit_code": exit_code, "code": code_of(exit_code)}


@pytest.mark.parametrize(
    "words", [*filter(is_typed_here, ["validate", "stats", "describe", "data verify --data"])]
)
def test_a_name_that_no_disk_holds_is_told(words):
    told = invoke(*words.split(), "a" * 300)
    assert (told.exit_code, told.stderr.count("\n")) == (2, 1) or told.exit_code == 3
    assert told.stderr.startswith("error: ")


@pytest.mark.parametrize("target", ["link", "nothing"])
def test_a_link_to_nothing_or_itself_is_told_before_anything_runs(tmp_path, target):
    (tmp_path / "link").symlink_to(tmp_path / target)
    for path in (tmp_path / "link", tmp_path / "link" / "below"):
        found = invoke("run", "--out", path)
        assert (found.exit_code, found.stderr.count("\n"), found.stdout) == (2, 1, "")
        assert "is a link to nothing, or to itself; remove it" in found.stderr


def test_a_quoted_file_is_harmless_and_a_bug_keeps_its_traceback(raiser):
    raiser(DataError("x: said\n\tthis\x1b[2J; get it again"))
    assert invoke("run").stderr == "error: x: said this\\x1b[2J; get it again\n"
    raiser(ZeroDivisionError("a bug"))
    assert isinstance(invoke("run").exception, ZeroDivisionError)


def test_a_recipe_that_cannot_be_loaded_hides_no_other(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("RECIPE = 1 / 0\n")
    monkeypatch.setenv(RECIPES_VARIABLE, str(tmp_path))
    monkeypatch.setattr(recipes, "names", lambda: ["broken", "smoke"])
    result = invoke("recipes", "--json")
    assert (result.exit_code, [*json.loads(result.stdout)]) == (0, ["smoke"])
    assert result.stderr.startswith(
        f"warning: recipe broken cannot be loaded: ZeroDivisionError: division by zero; raised at {tmp_path}"
    )
    assert result.stderr.count("\n") == 1


def test_data_is_made_verified_and_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path))
    refused = invoke("data", "verify", "--json")
    assert json.loads(refused.stdout)["exit_code"] == refused.exit_code == DataError.exit_code
    made = json.loads(invoke("data", "synth", "--json").stdout)
    assert (made["track"], made["folder"]) == ("smoke-cpu@2", str(tmp_path / "smoke"))
    verified = json.loads(invoke("data", "verify", "--full", "--json").stdout)
    digests = {shard["name"]: shard["sha256"] for shard in verified["shards"]}
    assert digests == {name: entry["sha256"] for name, entry in made["manifest"]["shards"].items()}
    assert f"ok  {tmp_path / 'smoke' / 'smoke_val_000000.bin'}  " in invoke("data", "verify").stdout
    listed = invoke("data", "list").stdout
    whole = r"smoke-cpu@2 +complete +\S+/smoke\n +4 of 4 shards \| 1\.51 Mtokens \| "
    part = r"main-8xh100@2 +incomplete +\S+/fineweb10B\n +.*no such folder; .*speedrun data get"
    assert all(re.search(pattern, listed) for pattern in (whole, part)), listed
    found = json.loads(invoke("data", "list", "--json").stdout)
    assert [one["track"] for one in found["tracks"]] == [track.load(name).id for name in track.files()]
    (tmp_path / "smoke" / "smoke_train_000003.bin").write_bytes(b"")
    (smoke,) = (
        x for x in json.loads(invoke("data", "list", "--json").stdout)["tracks"] if "smoke" in x["track"]
    )
    assert (smoke["complete"], ": 0 bytes; " in smoke["problem"]) == (False, True)
