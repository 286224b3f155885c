"""The files of `jobs/`, run with stand-ins: shells and YAML read them, and `speedrun` has what they ask of it."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml
from typed import program

from speedrun import cli

JOBS = Path(__file__).parents[2] / "jobs"
NAMES = ("kubernetes.yaml", "skypilot.yaml", "slurm.sh")
#: Arguments by number of nodes: the default, and what each file proposes.
WORDS = {
    1: ["batch"],
    2: ["run", "--devices", "16", "--set", "stages.0.num_sequences=16", "--set", "eval_sequences=16"],
}
STAND_INS = {
    # It writes down what it is told, and makes the folder of a record.
    "speedrun": """#!/bin/bash
printf '%s\n' "$(printf '%q ' "$@")" >>"$CALLS" # in one write: two hosts may write at once
if [[ $1 == "$FAILS" ]]; then code=5; fi
while (($#)); do [[ $1 != --out ]] || mkdir "$2" "$2.checkpoints"; shift; done
exit "${code:-0}"
""",
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
}


class Job(NamedTuple):
    script: str
    words: list[str]
    env: dict[str, str]


def job(name: str, num_nodes: int) -> Job:
    """A file, with what it says is to be set for several nodes."""
    text, words = (JOBS / name).read_text(), WORDS[num_nodes]
    if name == "kubernetes.yaml":
        pod = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        script = container["command"][-2]
        assert container["args"] == WORDS[1]
        env = {one["name"]: one["value"] for one in container["env"]}
        return Job(f"set -euo pipefail\n{script}", words, env | {"NODES": str(num_nodes)})
    if name == "skypilot.yaml":
        task = yaml.safe_load(text)
        assert task["envs"]["WORDS"] == shlex.join(WORDS[1])
        told = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_TASK_ID": "7"}
        told |= {"SKYPILOT_NUM_NODES": str(num_nodes), "WORDS": shlex.join(words)}
        return Job(task["run"], [], task["envs"] | told)
    told = {"SLURM_JOB_NAME": "speedrun", "SLURM_JOB_ID": "7", "SLURM_NNODES": str(num_nodes)}
    return Job(text, words if num_nodes > 1 else [], told)


def run(job: Job, here: Path, fails: str = "") -> tuple[int, list[list[str]], list[str]]:
    """Run a job below a folder; return its exit code, what `speedrun` was told, and what was kept."""
    programs = here / ".venv" / "bin"
    for path in ("tmp", "stage", "records", "shared/fineweb10B"):
        (here / path).mkdir(parents=True)
    for name, text in STAND_INS.items():
        program(programs / name, text)

    def moved(text: str) -> str:
        text = re.sub(r"(?<![\w/])/(tmp|stage|shared|records)\b", rf"{here}/\1", text)
        return text.replace("/home/me/speedrun", str(here))

    env = {**os.environ, **{key: moved(value) for key, value in job.env.items()}}
    env |= {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(here / "calls"), "FAILS": fails}
    argv = ["bash", "-c", moved(job.script), "speedrun", *job.words]
    code = subprocess.run(argv, env=env, cwd=here, timeout=600).returncode
    calls = [shlex.split(line) for line in (here / "calls").read_text().splitlines()]
    kept = [path.name for place in ("runs", "records", "shared/records") for path in (here / place).glob("*")]
    return code, calls, sorted(kept)


def parsed(call: list[str]) -> dict[str, Any]:
    """What a command makes of its arguments; an error if it has no such option."""
    command, words = cli.command, call
    while isinstance(command, click.Group):
        _, command, words = command.resolve_command(click.Context(command), words)
    assert command is not None
    return command.make_context(call[0], words).params


@pytest.mark.parametrize("name", NAMES)
def test_shells_find_no_fault_with_it(name, tmp_path):
    script = tmp_path / "script.sh"
    script.write_text("#!/usr/bin/env bash\n" + job(name, 1).script)
    argv = ["shellcheck", "--exclude=SC1128", script]  # 1128: a second line with #!
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_node_is_checked_and_has_the_shards_then_runs_and_the_record_is_kept(name, num_nodes, tmp_path):
    code, calls, kept = run(job(name, num_nodes), tmp_path)
    assert code == 0
    assert len(kept) == 2
    assert kept[1] == f"{kept[0]}.checkpoints"
    first_word = WORDS[num_nodes][0]
    assert [call[0] for call in calls] == ["doctor", "data", first_word]
    told = [parsed(call) for call in calls]
    assert {one["track"] for one in told} == {"main-8xh100"}
    trains = [given for given, call in zip(told, calls, strict=True) if call[0] == first_word]
    if num_nodes == 1:
        assert [given["runs"] for given in trains] == [None]
        return
    met = sorted((given["coordinator"], given["processes"], given["process"]) for given in trains)
    wanted = {
        "slurm.sh": [(None, None, None)],  # SLURM tells
        "kubernetes.yaml": [("speedrun-0.speedrun:12355", 2, None)],  # $JOB_COMPLETION_INDEX tells
        "skypilot.yaml": [("10.0.0.1:12355", 2, 1)],
    }
    assert met == wanted[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_machine_runs_nothing_and_a_failed_run_is_kept(name, tmp_path):
    for fails, num_calls, num_kept in (("doctor", 1, 0), ("batch", 3, 2)):
        here = tmp_path / fails
        code, calls, kept = run(job(name, 1), here, fails)
        assert (code, len(calls), len(kept)) == (5, num_calls, num_kept)
