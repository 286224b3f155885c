"""Everything that is measured on a GPU: a hang or a crash costs one part, and nothing that was measured is lost."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from typed import program, read_options

from speedrun.base.errors import SpeedrunError, UsageError
from speedrun.machine import bench_step
from speedrun.recipes import record21

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "measure_gpu.sh"


class Measured(NamedTuple):
    code: int
    lines: list[str]  #: of standard output
    errors: str


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script, and tokens that it need not make."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".gpu" / "tokens").mkdir(parents=True)
    for name in ("measure_gpu.sh", "help.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    return tmp_path


def measure(checkout: Path, does: str, *words: str) -> Measured:
    """Runs the script where each part, `speedrun $*`, is a piece of shell. Without words it looks for a GPU."""
    python = program(
        checkout / "python",
        f"""#!/bin/bash
[[ $1 != - ]] || exec python3 "$@"
[[ $1 != -c || $2 == *jax.devices* ]] || exit 0
shift 2
(($# == 0)) || {{ printf '%q ' "$@"; echo; }} >>{checkout}/typed
{does}
""",
    )
    env = {**os.environ, "SPEEDRUN_PYTHON": str(python)}
    argv = ["bash", checkout / "scripts" / "measure_gpu.sh", *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
    return Measured(done.returncode, done.stdout.splitlines(), done.stderr)


def typed(checkout: Path) -> list[str]:
    lines = (checkout / "typed").read_text().splitlines()
    (checkout / "typed").unlink()
    return lines


#: How parts end, and what their lines say.
ENDS = {
    "run": ('echo \'{"mean_ms": 812.25, "mfu": null}\'', "ok", "mean_ms 812.25"),
    "step-banded-w1": ('echo \'[{"name": "ours", "median_ms": 2.5}]\'', "ok", "ours 2.5"),
    "doctor": ("echo '{\"ready\": false}'; exit 1", "ok", ""),
    "profile-w1": ('echo \'{"error": "no GPU"}\'; exit 2', "refused", "error no GPU"),
    "plan": ('echo \'{"error": "no shard"}\'; exit 3', "failed", "error no shard"),
    "head": ("echo RuntimeError: CUDA error >&2; exit 1", "failed", "said last: RuntimeError: CUDA error"),
    "attention-w1": ("echo death >&2; kill -SEGV $$", "failed", "said last: death"),
}


def test_each_end_of_a_part_is_told_and_the_others_go_on(checkout):
    cases = [f"*' {name.partition('-')[0]} '*) {does} ;;" for name, (does, _, _) in ENDS.items()]
    names = ",".join(ENDS)
    done = measure(checkout, f'case " $* " in {" ".join(cases)} esac', "--rehearse", "--parts", names)
    found = {line.split()[1]: line for line in done.lines}
    assert found.keys() == ENDS.keys()
    for name, (_, status, said) in ENDS.items():
        assert (found[name].split()[0], said in found[name]) == (status, True)
    last = "measure_gpu: no figures of head attention-w1 plan"
    assert (done.code, done.errors.splitlines()[-1]) == (1, last)
    assert (checkout / "measured" / "summary.txt").read_text().splitlines() == done.lines


def test_slices_go_on_where_the_last_one_stopped(checkout):
    first = measure(checkout, "echo '{}'", "--parts", "doctor,head")
    assert (first.code, [line.split()[1] for line in first.lines]) == (0, ["doctor", "head"])
    late = measure(checkout, '[[ $1 != plan ]] || sleep 600; echo "{}"', "--parts", "plan", "--minutes", "0")
    assert late.lines == ["time is up before plan; the same command continues there"]
    typed(checkout)
    (checkout / "baseline").mkdir()
    baseline = str(checkout / "baseline")
    rest = measure(checkout, "echo '{}'", "--baseline", baseline, "--baseline89", baseline)
    names, asked = [line.split()[1] for line in rest.lines], typed(checkout)
    assert (rest.code, len({*names})) == (0, len(names))
    assert not {"doctor", "head"} & {*names}
    assert names[:5] == ["anvil", "anvil-table", "profile-92", "profile-89", "baseline-89"]
    for name, line in zip(names, asked, strict=True):
        read_options(f"speedrun {line}")
        given, window = shlex.split(line), re.search(r"(?:step|rank|profile).*-w(\d+)", name)
        if window is not None:
            step = int(given[given.index("--first-step") + 1])
            assert int(record21.RECIPE.inputs_at(step)["window_blocks"]) == int(window[1])
    again = measure(checkout, "echo '{}'")
    assert not again.lines
    assert measure(checkout, "echo '{}'", "--parts", "plan").code == 0
    assert measure(checkout, "echo '{}'", "--parts", "plam").code == 2


def test_the_parts_of_a_rehearsal_are_commands(checkout):
    (checkout / "baseline").mkdir()
    baseline = str(checkout / "baseline")
    done = measure(checkout, "echo '{}'", "--rehearse", "--baseline", baseline, "--baseline89", baseline)
    asked = typed(checkout)
    assert len({line.split()[1] for line in done.lines}) == len(asked) > 20
    for line in asked:
        read_options(f"speedrun {line}")


def test_a_gpu_that_jax_cannot_use_ends_the_session_at_once(checkout):
    done = measure(checkout, "echo CUDA_ERROR_SYSTEM_NOT_READY >&2; exit 1")
    assert (done.code, done.lines) == (2, [])
    assert "JAX cannot use this GPU (CUDA_ERROR_SYSTEM_NOT_READY)" in done.errors


BASELINE = """#!/bin/sh
echo warming up
i=0; while [ $i -lt $4 ]; do echo "{\\"step\\": $i, \\"time_s\\": 0.$((i + 1)), \\"loss\\": 5.0}"; i=$((i + 1)); done
"""


def stranger(folder: Path, text: str) -> list[str]:
    program(folder / "run", text)
    return [str(bench_step.executable(folder)), "--shards", "x", "--steps", "4"]


def test_a_baseline_is_read_line_by_line(tmp_path):
    curve = bench_step.run_baseline(stranger(tmp_path, BASELINE), 4)
    assert curve.ms == pytest.approx([100.0] * 4)
    assert curve.losses == [5.0] * 4
    ours = bench_step.Curve("ours", [90.0, 80.0, 80.0, 500.0], [5.0] * 4)
    slower = bench_step.Curve("ours", [120.0] * 4, [5.0] * 4)
    found = bench_step.compared([ours, curve, curve, slower])
    assert (found.ratio.mean, found.ratio.half_width) == pytest.approx((1.025, 12.706 * 0.175), rel=1e-3)
    for text in ("#!/bin/sh\necho torch: no kernel image >&2; exit 3\n", "#!/bin/sh\necho hello\n"):
        with pytest.raises(SpeedrunError, match=r"no kernel image|printed 0 steps"):
            bench_step.run_baseline(stranger(tmp_path, text), 4)
    (tmp_path / "run").unlink()
    with pytest.raises(UsageError, match="no executable"):
        bench_step.executable(tmp_path)


def gpu_image() -> str:
    """The Python of an environment like a GPU machine's: JAX for CUDA 13, and no msgspec."""
    python = os.environ.get("SPEEDRUN_GPU_IMAGE", "")
    if not python:
        pytest.skip("$SPEEDRUN_GPU_IMAGE names no Python like a GPU machine's; see CONTRIBUTING.md")
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("this user may make no network namespace (unshare -n)")
    return python


REFUSED = r"(step|rank)-triton-w\d+"  #: by a CPU


@pytest.mark.compile
def test_the_rehearsal_gives_figures_without_a_network(tmp_path):
    """Three minutes, and one to fetch the wheels where there is a network."""
    python, script = gpu_image(), str(SCRIPT)
    wheels, out, folder = tmp_path / "wheels", tmp_path / "out", tmp_path / "baseline"
    packed = subprocess.run([script, "--wheels", str(wheels)], capture_output=True, text=True)
    if packed.returncode:
        pytest.skip(f"no wheels: {packed.stderr.strip()}")
    assert sum(path.stat().st_size for path in wheels.iterdir()) <= 60 * 2**20
    stranger(folder, BASELINE)
    env = {**os.environ, "SPEEDRUN_PYTHON": python, "HOME": str(tmp_path)}
    env = {name: value for name, value in env.items() if not name.startswith(("JAX_", "XLA_"))}
    words = ["--from", str(wheels), "--rehearse", "--out", str(out)]
    words += ["--baseline", str(folder), "--baseline89", str(folder)]
    done = subprocess.run(["unshare", "-n", script, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = dict(line.split()[1::-1] for line in (out / "summary.txt").read_text().splitlines())
    assert {"baseline", "baseline-89", "plan"} <= ended.keys()
    for name, status in ended.items():
        assert status == ("refused" if re.fullmatch(REFUSED, name) else "ok"), done.stdout
