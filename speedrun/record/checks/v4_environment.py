"""V401 to V407: the environment of a run is known, is the track's, and gives no advantage."""

import re
from collections.abc import Iterator
from statistics import median

from speedrun.base import accelerators, provenance, runlog
from speedrun.base.sourcefile import RECIPES
from speedrun.record import git_history, layout
from speedrun.record.checks.table import Skip, check, check_run, if_ranked, same
from speedrun.record.logged_run import Run
from speedrun.record.reader import Record
from speedrun.record.reproduction import SAME_BENCH
from speedrun.record.source import is_science

#: XLA flags that change the schedule but no results, without the leading dashes. Flags that choose other products or
#: reductions (autotuning, Triton, cuBLASLt, split-K) change the rounding, and belong in the recipe.
_FLAGS = re.compile(
    r"xla_(force_host_platform_device_count|backend_optimization_level|llvm_disable_expensive_passes|"
    r"cpu_(use_fusion_emitters|parallel_codegen_split_count)|gpu_("
    r"(all_gather|all_reduce|reduce_scatter)_combine_threshold_bytes|enable_(latency_hiding_scheduler|command_buffer|"
    r"analytical_sol_latency_estimator|pipelined_(all_gather|all_reduce|reduce_scatter|p2p|collectives)|pdl|"
    r"async_collectives|highest_priority_async_stream|nccl_user_buffers|nccl_comm_splitting|dynamic_slice_fusion|"
    r"while_loop_double_buffering|while_loop_unrolling)|graph_min_graph_size|memory_limit_slop_factor|"
    r"deterministic_ops|exclude_nondeterministic_ops|collective_permute_decomposer_threshold|"
    r"lhs_enable_gpu_async_tracker|experimental_parallel_collective_overlap_limit|force_compilation_parallelism))"
)
#: The harness compiles with this: it keeps 16-bit numbers at 16 bits.
_EXACT = ("xla_allow_excess_precision", False)
#: Variables that choose the precision of every product. Runs record them so that V402 refuses them.
_PRECISION = {"JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64", "NVIDIA_TF32_OVERRIDE"}
_LOCK = re.compile(r"[a-z0-9][a-z0-9.-]{0,60}\.lock")
#: Packages whose versions a record must name.
_NEEDED = ("python", "jax", "jaxlib", "numpy", "optax")
_BEYOND = 10.0  #: multiple of the fastest known device
#: Lowest share of the vendor's rate; large products reach 0.6 to 0.8.
SLOWEST_OF_VENDOR = 0.5


@check_run(
    "V401 the compiler's settings are known ones",
    before="machine",
    why="an XLA flag can trade accuracy for speed, and no reader of source.txt would see it",
    hint="unset XLA_FLAGS; put flags that change rounding into the recipe, and propose harmless ones for this check",
)
def _xla_flags(run: Run, _record: Record) -> Iterator[str]:
    for word in run.preflight.environment.get("XLA_FLAGS", "").split():
        if not word.startswith("--") or not _FLAGS.fullmatch(word[2:].partition("=")[0]):
            yield f"XLA_FLAGS holds {word}"
    for option in (option for plan in run.of(runlog.Plan) for option in plan.compiler_options.items()):
        if option != _EXACT and not _FLAGS.fullmatch(option[0]):
            yield f"compiled with {option[0]}"


@check_run(
    "V402 the environment, and what a recipe sets of JAX, are known",
    before="machine",
    why="a variable can load foreign code, and may hold a secret",
    hint="unset what it names; set the precision in the recipe",
)
def _variables(run: Run, record: Record) -> Iterator[str]:
    """Settings of JAX, too. What is merely unknown is only named on a track that does not rank."""
    foreign = sorted(run.preflight.environment.keys() - set(provenance.VARIABLES))
    if refused := [name for name in foreign if not provenance.is_read(name)]:
        yield f"{', '.join(refused)}: no variable of a run"
    if precise := sorted(run.preflight.environment.keys() & _PRECISION):
        yield f"{', '.join(precise)}: may choose the precision of products"
    unknown = [name for name in foreign if name not in refused]
    unknown += sorted(name for made in run.of(runlog.Exported) for name in made.settings)
    if unknown and not refused and not precise:
        yield if_ranked(record, f"{', '.join(unknown)}: not known to change no program")


@check_run(
    "V403 the packages are those of a lock file",
    before="machine",
    why="another JAX is another compiler, so nobody can repeat the run without its versions",
    hint="install with scripts/install.sh, which takes all packages from requirements/",
)
def _packages(run: Run, record: Record) -> Iterator[str]:
    """The lock file must be of this version or of the run's commit, and pin the recorded versions."""
    hw = run.preflight
    if missing := [name for name in _NEEDED if not hw.software.get(name)]:
        yield f"no version of {', '.join(missing)} is recorded"
        return
    if not _LOCK.fullmatch(hw.lock):
        yield if_ranked(record, "it names no lock file, as none matched the installed packages")
        return
    path = f"requirements/{hw.lock}"
    known = git_history.files_here([path]), git_history.files_at(hw.commit, (path,)) or {}
    texts = [files[path] for files in known if path in files]
    text = next((text for text in texts if layout.sha256(text) == hw.lock_sha256), None)
    if text is None:
        yield if_ranked(record, f"{path} {hw.lock_sha256[:16]} is not of this version or the run's commit")
        return
    pins = provenance.pinned(text.decode(errors="replace"))
    if lacking := [name for name in _NEEDED if name not in pins and name != "python"]:
        yield f"{path} pins no {', '.join(lacking)}"
    for name, version in hw.software.items():
        if name in pins and version not in pins[name]:
            yield f"{name} {version} ran; the lock file has {', '.join(sorted(filter(None, pins[name])))}"


@check(
    "V404 the hardware is the track's, and the config's",
    before="machine",
    why="times and losses of other hardware belong to another board",
    hint="run on the track's hardware, without --devices",
)
def _hardware(record: Record) -> Iterator[str]:
    rules = record.rules.rules
    # A run that was killed before its preflight logged no hardware.
    runs = [(run, run.preflight) for run in record.runs if run.of(runlog.Preflight)]
    for run, hw in runs:
        stated, first = run.start.config.get("num_devices"), runs[0][0]
        for what, got, need in (
            ("platform", hw.platform, rules.platform.replace("any", hw.platform)),
            ("number of devices", hw.num_devices, rules.num_devices or hw.num_devices),
            ("kind of device", hw.device_kind, rules.device_kind or hw.device_kind),
            ("number of devices in its config", stated, hw.num_devices),
            (f"hardware, as in {first.folder}", run.hardware, first.hardware),
        ):
            yield same(f"{run.folder}: {what}", got, need)


@check_run(
    "V405 no device was throttled",
    before="run",
    severity="warning",
    why="a device that is too hot runs slower, so its times say little about the program",
    hint="let the machine cool, check its fans and power supply, and run again",
)
def _throttling(run: Run, record: Record) -> Iterator[str]:
    throttled_s = run.end.throttled_s
    if throttled_s is None:
        yield if_ranked(record, "throttling was not measured: no nvidia-smi, or an old driver")
    elif throttled_s != 0:
        yield f"{throttled_s:.3f} s of {run.train_time_s:.1f} s, summed over devices, were throttled"


@check_run(
    "V406 the code is that of a commit",
    before="machine",
    why="uncommitted code cannot be looked up, and may change between runs",
    hint="commit, then run; `git status` must work here, for this user; a copy without git makes no ranked record",
)
def _committed(run: Run, record: Record) -> Iterator[str]:
    hw = run.preflight
    texts = record.source_files
    theirs = git_history.files_at(hw.commit, tuple(texts))
    problem = ""
    if hw.dirty:
        problem = f"the code differed from commit {hw.commit[:12]}"
    elif hw.dirty is None or not git_history.COMMIT.fullmatch(hw.commit) or len(set(hw.commit)) == 1:
        problem = f"its commit is {hw.commit[:40]!r}; need the 40 hex digits of a commit that holds the code"
    elif theirs is None:
        problem = f"commit {hw.commit[:12]} is not known here; fetch it, or publish it with the record"
        if not git_history.is_complete():
            raise Skip(problem)
    if theirs is None or problem:
        yield if_ranked(record, problem)
        return
    # V503 compares the harness. On a track that does not rank, a recipe may come from outside the repository.
    science = [path for path in texts if is_science(path) and theirs.get(path) != texts[path].encode()]
    changed = [path for path in science if path in theirs or not path.startswith(f"{RECIPES}/")]
    if science and not changed:
        if_ranked(record, f"commit {hw.commit[:12]} has no {science[0]}")
    for path in science:
        yield f"claims commit {hw.commit[:12]}, which has {'another' if path in theirs else 'no'} {path}"


@check(
    "V407 the machine is as fast as others of its kind",
    before="run",
    severity="warning",
    why="on a slow node all times are too long, and an inflated benchmark lets impossible steps pass",
    hint="check the idle node with `speedrun doctor`, and run again on a healthy one",
)
def _health(record: Record) -> Iterator[str]:
    rates = {run.folder: run.bench_gflops for run in record.finished}
    kinds = {run.hardware for run in record.finished}
    if len(kinds) != 1:  # V404 reports several
        raise Skip("no run finished" if not kinds else "the runs have different hardware")
    ((num_devices, kind),) = kinds
    device = accelerators.named(kind)
    absurd = _BEYOND * max(known.bf16_flops for known in accelerators.DEVICES.values()) * num_devices / 1e9
    beyond = [folder for folder, (low, high) in rates.items() if not 0 < low <= high <= absurd]
    for folder in beyond:
        yield f"{folder}: the benchmark reached {rates[folder][1]:,.0f} Gflop/s, more than any device"
    if beyond:
        return
    if device is None and len(rates) < 2:
        raise Skip(f"one run on a {kind}, whose rate is unknown")
    usual = median(high for _, high in rates.values())
    slow = SAME_BENCH.get(record.reference_run.preflight.platform, min(SAME_BENCH.values()))
    for folder, (low, high) in rates.items():
        if low < usual * slow:
            yield f"{folder}: the benchmark reached {low:,.1f} Gflop/s, the median run {usual:,.1f}"
        if device is not None:
            most = device.bf16_flops * num_devices / 1e9
            if not SLOWEST_OF_VENDOR * most <= low <= high <= most:
                yield f"{folder}: the benchmark reached {high:,.0f} Gflop/s, the vendor's rate is {most:,.0f}"
