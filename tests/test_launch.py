"""What `speedrun launch` prints is run: with stand-ins for cluster and `speedrun`, and, where they are, for real.

Slow tests need programs that CI does not install, and say so: SLURM and munge of Debian; for Kubernetes and SkyPilot an
interpreter named by $SPEEDRUN_VALIDATORS that has `kubernetes-validate` and `skypilot`.
"""

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.testing import CliRunner, Result
from small_run import SMALL

from speedrun import cli
from speedrun.cli import launch
from speedrun.ground import track
from speedrun.ground.errors import UsageError
from speedrun.ground.sourcefile import RECIPES_VARIABLE
from speedrun.launch import kubernetes, request, shell, skypilot, slurm, ssh
from speedrun.launch.job import PORT, Job, clock_time, is_bucket
from speedrun.ledger.validate import validate
from speedrun.predict import plan as planning

ROOT = Path(__file__).parent.parent
FORMS = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot, "ssh": ssh}
SETTINGS = tuple(word for key, value in SMALL.items() for word in ("--set", f"{key}={value}"))
#: What a shell, YAML or sbatch would make something of.
HOSTILE = (
    "a'b",
    'a"b',
    "$(touch owned)",
    "`touch owned`",
    "; touch owned #",
    "a b  c",
    "*",
    "\\n",
    "&x: !!y",
    "é",
)


@pytest.fixture(scope="module", autouse=True)
def planned_once() -> Iterator[None]:
    """Without --time, each job plans its run: the same one in most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "plan", cache(planning.plan))
        yield


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.command, ["launch", *args], prog_name="speedrun")


def printed(*args: str) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


# --- a run on stand-ins --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A cluster of one machine, made of stand-ins."""

    folder: Path

    @property
    def calls(self) -> list[list[str]]:
        """What `speedrun` was told, in order."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def kept(self) -> list[Path]:
        return sorted((self.folder / "out").glob("*"))

    def job(self, **more: Any) -> Job:
        facts: dict[str, Any] = {
            "track": track.load("smoke-cpu"),
            "name": "test",
            "nodes": 1,
            "gpus": 0,
            "words": ("speedrun", "run", "--track", "smoke-cpu"),
            "time_s": 60,
            "out": str(self.folder / "out"),
            "stage": str(self.folder / "stage"),
            "checkout": str(self.folder / "checkout"),
            "hosts": (),
            "image": "",
            "claim": "claim",
        }
        return Job(**facts | more)

    def started(self, on: str, job: Job, **env: str) -> subprocess.Popen[str]:
        """What the cluster would start, of what is printed for it."""
        if on == "kubernetes":
            job = dataclasses.replace(job, image="registry/me/speedrun:1", checkout="")
        if on == "ssh" and not job.hosts:
            job = dataclasses.replace(job, hosts=("here",))
        text = FORMS[on].text(job)
        script = self.folder / "script.sh"
        script.write_text(text if on in ("slurm", "ssh") else pod_script(text))
        names = {"SLURM_JOB_ID": "7", "SLURM_NNODES": str(job.nodes), "SKYPILOT_TASK_ID": "7"}
        names |= {
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": "1",
        }
        path = f"{self.folder / 'bin'}:{self.folder / 'checkout' / '.venv' / 'bin'}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", str(script)],
            env={**os.environ, **names, **env, "PATH": path, "CALLS": str(self.folder / "calls")},
            cwd=self.folder / "checkout",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, name: str, running: subprocess.Popen[str] | None = None) -> None:
        """Until the run has made that file in its record."""
        for _ in range(1200):
            if list(self.folder.glob(f"stage/*/{name}")):
                return
            assert running is None or running.poll() is None, running.communicate()
            threading.Event().wait(0.05)
        pytest.fail(f"no file {name} after a minute")

    def ended(self, on: str, job: Job, **env: str) -> tuple[int, str]:
        running = self.started(on, job, **env)
        said, _ = running.communicate(timeout=60)
        return running.returncode, said


def until(happened: Callable[[], object]) -> None:
    """Waits for half a minute at most."""
    for _ in range(600):
        if happened():
            return
        threading.Event().wait(0.05)
    pytest.fail("it did not happen in 30 s")


def pod_script(text: str) -> str:
    """The program of a pod or a task."""
    found = yaml.safe_load(text)
    if found.get("kind") == "JobSet":
        found = found["spec"]["replicatedJobs"][0]["template"]
    return (
        found["run"] if "run" in found else found["spec"]["template"]["spec"]["containers"][0]["command"][2]
    )


SPEEDRUN = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "doctor":
    pathlib.Path(os.environ["CALLS"] + ".doctor").write_text(str(os.getpid()))
    time.sleep(float(os.environ.get("SECONDS_OF_DOCTOR", 0)))  # noqa: TID251
    sys.exit(int(os.environ.get("DOCTOR", 0)))
if sys.argv[1] in ("run", "batch"):
    out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    out.mkdir()
    (out / "README.md").write_text(os.environ["SPEEDRUN_DATA"])
    def stop(*_):
        (out / "stopped").touch()
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    (out / "begun").touch()
    time.sleep(float(os.environ.get("SECONDS_OF_RUN", 0)))  # noqa: TID251
    sys.exit(int(os.environ.get("RUN", 0)))
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    programs = {
        "checkout/.venv/bin/speedrun": SPEEDRUN,
        "bin/srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
        "bin/ssh": f'#!/bin/bash\nexec {sys.executable} {ROOT}/tests/fake_ssh.py "$@"\n',
    }
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return Place(tmp_path)


def shards(folder: Path) -> Path:
    """What looks like the shards of the smoke track."""
    folder.mkdir()
    for name in (*track.load("smoke-cpu").data.sha256, "manifest.json", "another.bin"):
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize("on", FORMS)
def test_a_node_is_looked_at_then_has_the_shards_then_runs_and_the_record_comes_home(place: Place, on: str):
    data = shards(place.folder / "shared")
    code, said = place.ended(on, place.job(data=str(data)))
    assert code == 0, said
    staged = place.folder / "stage" / "shards" / "smoke"
    assert [call[:2] for call in place.calls] == [
        ["doctor", "--track"],
        ["data", "verify"],
        ["run", "--track"],
    ]
    assert place.calls[1] == ["data", "verify", "--track", "smoke-cpu", "--full"]
    assert {path.name for path in staged.iterdir()} == {*track.load("smoke-cpu").data.sha256, "manifest.json"}
    (record,) = place.kept
    assert record.name.startswith("test")
    assert (record / "README.md").read_text() == str(staged.parent), "the run looks where the shards were put"
    assert f"record  {record}" in said


@pytest.mark.parametrize("on", FORMS)
def test_without_data_each_node_makes_them(place: Place, on: str):
    assert place.ended(on, place.job())[0] == 0
    assert place.calls[1] == ["data", "synth", "--track", "smoke-cpu"]


@pytest.mark.parametrize("on", FORMS)
def test_a_run_that_failed_is_kept_and_its_exit_code_goes_on(place: Place, on: str):
    code, said = place.ended(on, place.job(), RUN="5")
    assert code == 5, said
    assert len(place.kept) == 1


@pytest.mark.parametrize("on", FORMS)
def test_a_bad_machine_runs_nothing(place: Place, on: str):
    code, said = place.ended(on, place.job(), DOCTOR="1")
    assert code == 1, said
    assert place.calls == [["doctor", "--track", "smoke-cpu"]]
    assert not place.kept


@pytest.mark.parametrize("on", FORMS)
def test_a_place_that_cannot_be_written_is_told_before_anything_runs(place: Place, on: str):
    (place.folder / "file").touch()
    code, said = place.ended(on, place.job(out=str(place.folder / "file" / "out")))
    assert code == 2, said
    assert "/file/out cannot be written; pass another --out" in said
    assert not place.calls


@pytest.mark.parametrize("on", ["slurm", "kubernetes", "skypilot"])
def test_a_job_of_the_same_name_leaves_the_earlier_record_as_it_is(place: Place, on: str):
    assert place.ended(on, place.job())[0] == 0
    (first,) = place.kept
    (first / "README.md").write_text("mine")
    code, said = place.ended(on, place.job())
    assert code == 0, said
    assert (len(place.kept), (first / "README.md").read_text()) == (2, "mine")


def test_a_record_that_cannot_be_fetched_is_no_success(place: Place):
    tar = place.folder / "bin" / "tar"
    tar.write_text("#!/bin/sh\nexit 1\n")
    tar.chmod(0o755)
    code, said = place.ended("ssh", place.job())
    assert code == 1, said
    assert (
        f"launch: no record came from here; if one was begun, it lies there: {place.folder}/stage/test-"
        in said
    )


@pytest.mark.parametrize("on", ["skypilot", "ssh"])
def test_a_limit_of_time_tells_a_run_once(on: str):
    """Seen: of six signals that `timeout` had passed on by process and by group, two came twice."""
    text = FORMS[on].text(Place(Path("/x")).job(hosts=("here",)))
    assert "timeout --foreground --kill-after=120 60 speedrun run" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder somebody else's")
@pytest.mark.parametrize("on", FORMS)
def test_a_folder_of_somebody_else_is_not_trusted(place: Place, on: str):
    (place.folder / "stage").mkdir()
    os.chown(place.folder / "stage", 12345, 12345)
    code, said = place.ended(on, place.job())
    assert code == 2, said
    assert "belongs to somebody else; pass another --stage" in said
    assert not place.calls


@pytest.mark.parametrize("on", ["kubernetes", "skypilot", "ssh"])
def test_a_signal_reaches_the_run_and_its_record_comes_home(place: Place, on: str):
    """SLURM tells the tasks itself; its script only has to outlive them."""
    running = place.started(on, place.job(), SECONDS_OF_RUN="50")
    try:
        place.wait_for("begun", running)
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 75, said
    assert [path.name for record in place.kept for path in record.glob("stopped")] == ["stopped"]


def test_hosts_stop_when_nobody_holds_the_connection(place: Place):
    """Not even a script that was killed leaves a run behind."""
    running = place.started("ssh", place.job(), SECONDS_OF_RUN="50")
    place.wait_for("begun", running)
    running.kill()
    running.communicate(timeout=30)
    place.wait_for("stopped")


def test_hosts_stop_also_while_they_are_looked_at(place: Place):
    running = place.started("ssh", place.job(), SECONDS_OF_DOCTOR="50")
    told = place.folder / "calls.doctor"
    until(lambda: told.exists() and told.read_text())
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=30)
    assert running.returncode == 143, said
    until(lambda: not Path("/proc", told.read_text()).exists())
    assert not place.kept


def test_slurm_stays_when_it_is_told_to_stop(place: Place):
    running = place.started("slurm", place.job(), SECONDS_OF_RUN="1")
    place.wait_for("begun", running)
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=30)
    assert running.returncode == 0, said
    assert len(place.kept) == 1


@pytest.mark.parametrize("on", ["slurm", "skypilot", "ssh"])
def test_no_value_becomes_code(place: Place, on: str):
    folder = place.folder / "it's $(touch owned) & `so`"
    folder.mkdir()
    words = (*place.job().words, *(f"--title={text}" for text in HOSTILE))
    more = {"words": words, "data": str(shards(folder / "data")), "stage": str(folder / "stage")}
    code, said = place.ended(on, place.job(**more, out=str(folder / "out")))
    assert code == 0, said
    assert place.calls[-1][:-2] == list(words[1:])
    assert (folder / "out").is_dir()
    assert not list(place.folder.rglob("owned"))


def test_no_value_becomes_yaml():
    words = ("speedrun", "run", *HOSTILE)
    job = Place(Path("/shared")).job(words=words, out="/shared/a: b #c", image="r/i:1")
    script = pod_script(kubernetes.text(job))
    (line,) = (line for line in script.splitlines() if line.startswith("run="))
    assert tuple(shlex.split(line[len("run=(") : -1])) == words
    assert "out='/shared/a: b #c'" in script


@pytest.mark.parametrize("text", HOSTILE)
def test_no_path_becomes_yaml(text: str):
    task = skypilot.text(Place(Path("/x")).job(checkout=f"/{text}", hosts=()))
    assert yaml.safe_load(task)["workdir"] == f"/{text}"


@pytest.mark.parametrize("text", ["a\nb", "  a", ""])
def test_a_template_indents_what_stands_alone_and_drops_what_is_empty(text: str, monkeypatch, tmp_path: Path):
    (tmp_path / "t").write_text("x:\n  @@text\n@@{if_no}never\n@@{if_yes}$a @@@@ @@other\n")
    monkeypatch.setattr(shell, "_TEMPLATES", tmp_path)
    body = "".join(f"  {line}\n" for line in text.splitlines())
    rendered = shell.render("t", text=text, if_no=False, if_yes=True, other="@@text")
    assert rendered == f"x:\n{body}$a @@ @@text\n"


@pytest.mark.parametrize(
    "field", ["out", "data", "stage", "checkout", "name", "partition", "account", "image"]
)
@pytest.mark.parametrize("text", ["/a\n#SBATCH --wrap=x", "/a\r", "/a\0b", "/a\x1b[2J", "-x"])
def test_a_text_that_a_file_could_be_changed_by_is_refused(field: str, text: str):
    with pytest.raises(UsageError) as caught:
        Place(Path("/shared")).job(**{field: text})
    assert str(caught.value).isprintable()


# --- several nodes ---------------------------------------------------------------------------------------------


def test_ssh_gives_each_host_its_number_and_all_the_address_of_the_first(place: Place):
    code, said = place.ended("ssh", place.job(nodes=2, hosts=("me@one", "two")))
    # Both are this machine, and the second one finds the record's folder taken.
    assert code in (0, 1), said
    runs = [call for call in place.calls if call[0] == "run"]
    assert sorted(call[call.index("--process") + 1] for call in runs) == ["0", "1"]
    for call in runs:
        assert call[call.index("--coordinator") + 1] == f"one:{PORT}"
        assert call[call.index("--processes") + 1] == "2"


def test_skypilot_says_which_node_a_task_is(place: Place):
    code, said = place.ended("skypilot", place.job(nodes=2))
    assert code == 0, said
    joined = ["--coordinator", f"10.0.0.1:{PORT}", "--processes", "2", "--process", "1"]
    assert shlex.join(joined) in shlex.join(place.calls[-1])


def test_pods_find_the_first_one_by_its_name():
    """As the JobSet's documentation composes it: <set>-<job>-<job index>-<pod index>.<subdomain>."""
    job = Place(Path("/shared")).job(nodes=3, image="i", namespace="ns", gpus=8)
    found = yaml.safe_load(kubernetes.text(job))
    (inner,) = found["spec"]["replicatedJobs"]
    first = f"{found['metadata']['name']}-{inner['name']}-0-0.{found['spec']['network']['subdomain']}:{PORT}"
    assert f"--coordinator {first} --processes 3" in pod_script(kubernetes.text(job))
    spec = inner["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert (spec["backoffLimit"], found["spec"]["failurePolicy"]) == (0, {"maxRestarts": 0})
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    memory = {"name": "memory", "emptyDir": {"medium": "Memory"}}
    assert memory in pod["volumes"]
    assert {"name": "memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


# --- the command -----------------------------------------------------------------------------------------------

EACH = {
    "slurm": ["--on", "slurm"],
    "kubernetes": ["--on", "kubernetes", "--image", "r/i:1", "--claim", "work"],
    "skypilot": ["--on", "skypilot", "--price", "20", "--cloud", "aws/us-east-1"],
    "ssh": ["--on", "ssh", "--hosts", "me@node1"],
}
SEVERAL = {
    **{on: [*words, "--nodes", "2"] for on, words in EACH.items()},
    "ssh": ["--on", "ssh", "--hosts", "a,b"],
}


@pytest.mark.parametrize(
    "words", [*EACH.values(), *SEVERAL.values(), [*EACH["slurm"], "--image", "r/i:1"]], ids=" ".join
)
@pytest.mark.parametrize("data", [[], ["--data", "/shared/smoke"]], ids=["made", "staged"])
def test_shells_find_no_fault_with_it(words: list[str], data: list[str], tmp_path: Path):
    text = printed(*words, *data, "--track", "smoke-cpu", "--", "--seed", "1")
    script = tmp_path / "script.sh"
    script.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{pod_script(text)}")
    for argv in (
        ["bash", "-n"],
        ["shellcheck", "--exclude=SC2329"],
    ):  # 2329: functions that another shell is given
        done = subprocess.run([*argv, script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_a_ranked_job_asks_of_slurm():
    words = ["--on", "slurm", "--runs", "4", "--data", "/shared/x", "--partition", "gpu", "--account", "me"]
    text = printed(*words, "--time", "1:02:03")
    head = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = {"nodes=1", "ntasks-per-node=1", "gpus-per-node=8", "exclusive", "no-requeue", "time=1:02:03"}
    assert wanted | {"partition=gpu", "account=me"} <= set(head)
    assert "run=(speedrun batch --track main-8xh100 --runs 4)" in text
    assert "the hardware of a rank" in text


@pytest.mark.compile
def test_the_limit_is_what_the_plan_expects_and_more():
    planned = CliRunner().invoke(
        cli.command, ["plan", "--recipe", "record21", "--arithmetic", "--json"], prog_name="speedrun"
    )
    train_s, rules = json.loads(planned.stdout)["total_s"], track.load("main-8xh100").rules
    for runs in (4, 40):
        limit_s = json.loads(printed(*EACH["slurm"], "--runs", str(runs), "--json"))["time_limit_s"]
        assert limit_s >= rules.untimed_cap_s + 2 * runs * train_s
        assert limit_s <= 2 * rules.untimed_cap_s + runs * (2 * train_s + 600)


def test_it_says_what_is_not_ranked():
    words = [*EACH["slurm"], "--nodes", "2", "--time", "1:00:00"]
    result = invoke(*words, "--gpus-per-node", "4")
    assert result.exit_code == 0
    assert result.stderr == "note: main-8xh100@1 ranks one node of 8 GPUs; a run on 2 of 4 is not ranked\n"
    assert "--devices" not in result.stdout
    assert (
        "--devices 16"
        in invoke(*words, "--", "--set", "stages.0.num_sequences=16", "--set", "eval_sequences=16").stdout
    )
    result = invoke(*EACH["slurm"], "--time", "1:00:00")
    assert result.stderr == "note: a rank on main-8xh100@1 needs a batch; add --runs 4 or more\n"
    assert "--devices" not in result.stdout
    assert invoke(*EACH["slurm"], "--runs", "4", "--time", "1:00:00").stderr == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "slrum"], "unknown cluster 'slrum'; did you mean 'slurm'?"),
        ([*EACH["slurm"], "--track", "main"], "unknown track 'main'; "),
        ([*EACH["slurm"], "--nodes", "0"], "0 is not in the range 1<=x<=4096; "),
        ([*EACH["slurm"], "--nodes", "2", "--runs", "4"], "--runs 4 on 2 nodes; a batch runs on one: leave out"),
        ([*EACH["slurm"], "--gpus-per-node", "0"], "--gpus-per-node 0; main-8xh100@1 needs GPUs; "),
        ([*EACH["slurm"], "--track", "smoke-cpu", "--gpus-per-node", "1"], "smoke-cpu@1 runs on CPUs; leave it"),
        ([*EACH["slurm"], "--track", "webmini"], "--data missing; webmini@1 brings no shards: pass a folder"),
        ([*EACH["slurm"], "--hosts", "a"], "--hosts is for ssh, got --on slurm; leave it out"),
        ([*EACH["slurm"], "--data", "shards"], "--data shards; a job starts elsewhere: need a path that begins"),
        ([*EACH["slurm"], "--data", "s3://b/c"], "--data s3://b/c; only skypilot mounts buckets; need a path"),
        ([*EACH["slurm"], "--data", "/x/d", "--stage", "/x"], "--data lies below --stage /x, which is cleared"),
        ([*EACH["slurm"], "--data", "/a,b", "--image", "i"], "--data /a,b, --stage /tmp/speedrun-"),
        ([*EACH["slurm"], "--partition", "a b"], "--partition 'a b'; need letters, digits and any of"),
        ([*EACH["slurm"], "--time", "90m"], "--time '90m'; need H:MM:SS, as in 2:30:00"),
        ([*EACH["slurm"], "--time", "0:00:00"], "--time '0:00:00'; need H:MM:SS, as in 2:30:00"),
        ([*EACH["slurm"], "--time", "99999:00:00"], "--time '99999:00:00'; need H:MM:SS, as in 2:30:00"),
        ([*EACH["slurm"], "--out", ""], "--out is empty; pass something, or leave it out"),
        ([*EACH["slurm"], "--name", "Mine"], "--name 'Mine'; need small letters, digits and dashes"),
        ([*EACH["slurm"], "--gpu", "h10"], "unknown device kind 'h10'; did you mean 'h100'?"),
        ([*EACH["slurm"], "--", "--seed"], "option '--seed' requires an argument"),
        ([*EACH["slurm"], "--", "--sede", "1"], "'--sede'"),
        ([*EACH["slurm"], "--", "--out", "x"], "--out is given after --, but launch sets it; use its own --out"),
        ([*EACH["slurm"], "--", "--devices", "8"], "--devices is given after --, but launch sets it; "),
        ([*EACH["slurm"], "--", "--set", "x"], "--set 'x'; need key=value"),
        ([*EACH["slurm"], "--", "--set", "x=1"], "unknown setting 'x'; "),
        ([*EACH["slurm"], "--nodes", "2", "--", "--checkpoint-every", "9"], "which share no disk; need"),
        ([*EACH["slurm"], "--nodes", "2"], "8 sequences in 16 parts on 16 devices do not come out even; need"),
        ([*EACH["slurm"], "--gpus-per-node", "3"], "got 3 devices for a replica, need a divisor of 8"),
        (["--on", "kubernetes", "--claim", "c"], "--image missing; pods are made of one"),
        (["--on", "kubernetes", "--image", "i"], "--claim missing; a pod's disk is deleted"),
        ([*EACH["kubernetes"], "--out", "/home/me"], "--out /home/me; the claim is mounted at /shared: need a path"),
        (["--on", "ssh"], "--hosts names 0 hosts, got --nodes 1; need --hosts A,B,... and no --nodes"),
        ([*EACH["ssh"], "--nodes", "2"], "--hosts names 1 hosts, got --nodes 2; "),
        (["--on", "ssh", "--hosts", "a,b,a"], "--hosts a,b,a repeats a host; each has one process; name it once"),
        ([*EACH["slurm"], "--image", "i", "--checkout", "/x"], "--image and --checkout; speedrun is in one of them"),
        ([*EACH["ssh"], "--image", "i"], "--image with --on ssh; "),
        (["--on", "ssh", "--hosts", "-oProxyCommand=x"], "--hosts '-oProxyCommand=x'; need names or addresses"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(words: list[str], message: str):
    result = invoke("--time", "1:00:00", *words)  # or each would plan its run first
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert message in line
    assert result.stdout == ""


def test_a_recipe_outside_the_package_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RECIPES_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    source = "from dataclasses import replace\nfrom speedrun.science.recipes import smoke\n"
    Path("mine.py").write_text(source + 'RECIPE = replace(smoke.RECIPE, name="mine")\n')
    words = ["--track", "smoke-cpu", "--time", "1:00:00"]
    text = printed("--on", "slurm", *words, "--", "--recipe", "mine.py")
    assert f"--recipe mine.py --recipe {tmp_path}/mine.py" in text, "the last one counts"
    result = invoke(*EACH["kubernetes"], *words, "--", "--recipe", "mine.py")
    assert (result.exit_code, "mine.py is not in image" in result.stderr) == (2, True)


def test_a_wheel_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "ROOT", tmp_path)
    words = ["--on", "slurm", "--track", "smoke-cpu", "--time", "1:00:00"]
    assert "--checkout missing; this speedrun is installed from a wheel" in invoke(*words).stderr
    assert "checkout=/here" in printed(*words, "--checkout", "/here")


def test_it_is_printed_or_saved_and_never_over_another_file(tmp_path: Path):
    path = tmp_path / "job.sh"
    words = [*EACH["slurm"], "--track", "smoke-cpu"]
    assert printed(*words, "--save", str(path)) == ""
    assert path.read_text() == printed(*words)
    again = invoke(*words, "--save", str(path))
    assert (again.exit_code, "exists already; need a new file" in again.stderr) == (2, True)
    told = json.loads(printed(*words, "--json"))
    assert (told["text"], told["ranked"], told["submitted"]) == (path.read_text(), False, False)


@pytest.mark.parametrize(
    ("on", "argv"),
    [
        ("slurm", ["sbatch"]),
        ("kubernetes", ["kubectl", "create", "--filename=-"]),
        ("skypilot", ["sky", "launch", "--cluster", "mine"]),
        ("ssh", ["bash"]),
    ],
)
def test_the_client_of_the_cluster_gets_what_is_printed(
    on: str, argv: list[str], tmp_path: Path, monkeypatch
):
    """On its standard input, or in a file that is its last argument; its exit code is ours."""
    log = tmp_path / "log"
    for program in {argv[0], *(["ssh"] if on == "ssh" else [])}:
        path = tmp_path / program
        path.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            "path = sys.argv[-1]\n"
            "given = open(path).read() if path.endswith(('.sh', '.yaml')) else sys.stdin.read()\n"
            f"json.dump([sys.argv[1:], given], open({str(log)!r}, 'w')); sys.exit(3)\n"
        )
        path.chmod(0o755)
    words = [*EACH[on], "--track", "smoke-cpu", "--name", "mine"]
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke(*words, "--submit")
    assert result.exit_code == 3, result.output
    told, given = json.loads(log.read_text())
    assert told[: len(argv) - 1] == argv[1:]
    assert given == printed(*words)
    assert not [word for word in told if word.startswith("/") and Path(word).exists()], (
        "the scratch file is gone"
    )
    (tmp_path / argv[0]).unlink()
    missing = invoke(*words, "--submit")
    assert missing.exit_code == 2
    assert f"--submit needs {argv[0]}, which is not on the PATH" in missing.stderr.splitlines()[-1]


@pytest.mark.parametrize("code", [0, 3])
def test_json_says_what_became_of_it(code: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "submit", lambda *_, **__: code)
    result = invoke(*EACH["slurm"], "--track", "smoke-cpu", "--submit", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["exit_code"], told["submitted"]) == (code, code, code == 0)


def test_json_is_one_object_also_of_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke(*EACH["slurm"], "--track", "smoke-cpu", "--submit", "--json")
    assert result.exit_code == 2
    assert "sbatch, which is not on the PATH" in json.loads(result.stdout)["error"]


def test_units():
    assert [clock_time(s) for s in (59, 3600, 360_061)] == ["0:00:59", "1:00:00", "100:01:01"]
    assert [is_bucket(p) for p in ("s3://b/c-d/", "gs://b", "/s3", "s3://b/$(x)")] == [
        True,
        True,
        False,
        False,
    ]


# --- the real ones ---------------------------------------------------------------------------------------------


def checkout(folder: Path) -> Path:
    """A checkout whose environment is the one of the tests."""
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    return folder


def check_record(out: Path) -> None:
    """Of a small run in two processes: whole and valid, only its target is missed."""
    (path,) = (folder for folder in out.iterdir() if folder.is_dir())
    assert validate(path).exit_code == 0
    (log,) = path.glob("runs/*/metrics.jsonl")
    assert '"num_processes":2' in log.read_text()


@pytest.mark.compile
@pytest.mark.skipif(
    not shutil.which("slurmctld", path="/usr/sbin:/usr/bin"),
    reason="needs SLURM: apt install slurmctld slurmd slurm-client munge",
)
def test_slurm_runs_it_in_two_tasks(tmp_path: Path):
    env = {**os.environ, "CHECKOUT": str(checkout(tmp_path / "checkout")), "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    out = tmp_path / "out"
    argv = [ROOT / "scripts" / "slurm_smoke.sh", out, *SETTINGS]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + done.stderr  # the target is missed in 12 steps
    assert "2 processes, told by SLURM" in (out / "job.log").read_text()
    check_record(out)


@pytest.mark.compile
def test_ssh_runs_it_on_two_hosts(place: Place):
    """Both are this machine: stand-ins for the connection only."""
    out = place.folder / "out"
    words = (*place.job().words, *SETTINGS)
    shutil.rmtree(place.folder / "checkout")
    job = place.job(words=words, nodes=2, hosts=("127.0.0.1", "localhost"), time_s=240)
    checkout(place.folder / "checkout")
    running = place.started("ssh", job, PYTHONPATH=str(ROOT))
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 1, said
    check_record(out)


def asked_validators(program: str, *args: str) -> str:
    python = os.environ.get("SPEEDRUN_VALIDATORS")
    if not python:
        pytest.skip("needs $SPEEDRUN_VALIDATORS: a Python with kubernetes-validate and skypilot")
    done = subprocess.run([python, "-c", program, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.compile
@pytest.mark.parametrize(
    "words", [EACH["kubernetes"], [*SEVERAL["kubernetes"], "--gpus-per-node", "4"]], ids=["one", "several"]
)
def test_kubernetes_knows_every_field(words: list[str]):
    """The Job, also the one inside of a JobSet, by the schemas of Kubernetes; another field would be refused."""
    found = yaml.safe_load(printed(*words, "--namespace", "ns"))
    if found["kind"] == "JobSet":
        inner = found["spec"]["replicatedJobs"][0]["template"]
        found = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **inner}
    program = """
import json, sys, kubernetes_validate as validator
job = json.loads(sys.argv[1])
validator.validate(job, "1.31", strict=True)
job["spec"]["template"]["spec"]["containers"][0]["imagge"] = "x"
try:
    validator.validate(job, "1.31", strict=True)
except validator.ValidationError:
    print("good")
"""
    assert asked_validators(program, json.dumps(found)) == "good\n"


@pytest.mark.compile
@pytest.mark.parametrize(
    "words",
    [EACH["skypilot"], [*SEVERAL["skypilot"], "--gpus-per-node", "4", "--out", "s3://b/c"]],
    ids=["one", "several"],
)
def test_skypilot_reads_it(words: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "task.yaml"
    path.write_text(printed(*words))
    program = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(wanted,) = task.resources
print(json.dumps([task.num_nodes, wanted.accelerators, wanted.max_hourly_cost, wanted.region, bool(task.run)]))
"""
    told = json.loads(asked_validators(program, str(path)).splitlines()[-1])
    nodes = 2 if "--nodes" in words else 1
    assert told == [nodes, {"H100": 8 // nodes}, 20.0, "us-east-1", True]
