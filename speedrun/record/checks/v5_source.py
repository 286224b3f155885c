"""V501, V503, V505 to V507: the source is complete, its fixed parts are unchanged, and sizes are right.

The source is parsed but never executed.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from speedrun.base import runlog
from speedrun.base.sourcefile import RECIPES
from speedrun.base.track import Fixed
from speedrun.record import git_history, layout
from speedrun.record.checks.table import Skip, check, check_run, if_ranked
from speedrun.record.logged_run import Run
from speedrun.record.reader import Record
from speedrun.record.source import Names, is_science, read

_ENTRY = "speedrun/train/run.py"


def _need_source(record: Record) -> None:
    if not record.source_files:
        raise Skip("source.txt cannot be read: see V003 and V008")


@check(
    "V501 the source can be read, and is complete",
    before="run",
    why="others read, replay and fork the source, so all of it must be there",
    hint="let the harness write source.txt from the import statements",
)
def _whole(record: Record) -> Iterator[str]:
    _need_source(record)
    files = record.source_files
    for run in record.runs:
        tracks = f"speedrun/tracks/{run.start.track.rpartition('@')[0]}.toml"
        for path in (_ENTRY, f"{RECIPES}/{run.start.recipe}.py", tracks):
            if path not in files:
                yield f"{run.folder}: ran {path}, which is missing"
        # V006 reports unknown tracks.
        other = record.track is not None and tracks in files
        if other and layout.sha256(files[tracks].encode()) != run.start.track_sha256:
            yield f"{run.folder}: ran on another track than {tracks}"
    yield from _unreadable_and_missing(files)


def _unreadable_and_missing(files: dict[str, str]) -> Iterator[str]:
    """Report files that do not parse, and imports of missing modules or names of this package."""
    names: dict[str, Names] = {}
    paths = [path for path in files if path.endswith(".py")]
    for path in paths:
        try:
            names[_module(path)] = read(files[path])
        except ValueError as error:
            names[_module(path)] = Names([], set())
            yield f"{path} cannot be read: {error}"
    for path in paths:
        for line, module, name in names[_module(path)].imports:
            full = module if name is None else f"{module}.{name}"
            here = full in names or (module in names and name in names[module].bound)
            if module.partition(".")[0] == "speedrun" and not here:
                yield f"{path} line {line}: imports {full}, which is missing"


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@check(
    "V503 the harness in the source is the harness",
    before="machine",
    why="records are comparable only with the same clock, data and validation",
    hint="change only the science; propose changes to the harness separately, before the record",
)
def _harness(record: Record) -> Iterator[str]:
    """The harness must be, byte for byte, that of this version or of the run's commit."""
    _need_source(record)
    rules = f"speedrun/tracks/{record.rules.name}.toml"  # V501 compares it with the run's digest
    texts = {
        path: text for path, text in record.source_files.items() if not is_science(path) and path != rules
    }
    if strangers := [path for path in texts if not path.startswith("speedrun/")]:
        yield from (f"{path}: not a file of the harness" for path in strangers)
        return
    # A commit does not describe uncommitted code.
    commits = {run.preflight.commit * (not run.preflight.dirty) for run in record.finished} or {""}
    differ = _of_no_version(texts, commits)
    if differ and any(git_history.files_at(commit, ()) is None for commit in commits):
        some = ", ".join(differ[:6]) + ", ..." * (len(differ) > 6)
        yield if_ranked(record, f"not of this version, and the run's commit is not known here: {some}")
        return
    shown = ", ".join(sorted(commit[:12] for commit in commits))
    yield from (f"{path} differs from commit {shown}" for path in differ)


def _of_no_version(texts: dict[str, str], commits: set[str]) -> list[str]:
    """Return the files that differ from this version and from one of the commits."""
    here = git_history.files_here(texts)
    differ = tuple(path for path, text in texts.items() if here.get(path) != text.encode())
    known = [git_history.files_at(commit, differ) or {} for commit in commits]
    return [path for path in differ if any(files.get(path) != texts[path].encode() for files in known)]


@check_run(
    "V505 the state holds only parameters and optimiser state",
    before="run",
    why="a table that is not a parameter can memorise the training text without being counted",
    hint="make it a parameter, or run on a track that permits a larger state",
)
def _state(run: Run, record: Record) -> Iterator[str]:
    (plan,), hw = run.of(runlog.Plan), run.preflight
    if (replicas := run.start.config.get("replicas", 1)) != hw.num_replicas:
        yield f"its config says {replicas!r} replicas, its hardware {hw.num_replicas}"
    if hw.num_devices % hw.num_replicas:
        yield f"{hw.num_devices} devices cannot hold {hw.num_replicas} replicas"
    cap = record.rules.rules.state_bytes_per_param
    held = _held_bytes(run, plan)
    if held > cap * plan.num_params:
        yield (
            f"a state of {held:,} bytes for {plan.num_params:,} parameters; the track permits {cap:g} for each"
        )


def _held_bytes(run: Run, plan: runlog.Plan) -> int:
    """Return the bytes of one replica of the state."""
    return plan.state_bytes_per_device * run.preflight.num_devices // run.preflight.num_replicas


_FEWEST_BYTES = 2  #: of the narrowest dtype of parameters


@check_run(
    "V506 the number of parameters is right",
    before="run",
    why="models are compared by size, and the flops that V209 checks follow from it",
    hint="let the harness sum the shapes that the recipe's table declares",
)
def _parameters(run: Run, record: Record) -> Iterator[str]:
    (plan,) = run.of(runlog.Plan)
    if (count := sum(map(prod, plan.shapes.values()))) != plan.num_params:
        yield f"says {plan.num_params:,} parameters, its shapes sum to {count:,}"
    if (most := record.rules.rules.most_params) is not None and plan.num_params > most:
        yield f"{plan.num_params:,} parameters; the track permits {most:,}"
    (first,) = record.finished[0].of(runlog.Plan)
    if (plan.num_params, plan.shapes) != (first.num_params, first.shapes):
        yield f"has other parameters than {record.finished[0].folder}"
    if _held_bytes(run, plan) < _FEWEST_BYTES * plan.num_params:
        yield f"{plan.num_params:,} parameters do not fit into its state"
    if not 0 < plan.flops_per_token <= 6 * plan.num_params:
        yield f"{plan.flops_per_token:,.0f} flops a token; {plan.num_params:,} parameters take at most 6 each"
    # Matrices except tables take 6 flops per parameter and token, forward and backward. Half allows for small tables.
    vocab = record.rules.data.vocab_size
    multiplied = sum(prod(shape) for shape in plan.shapes.values() if len(shape) > 1 and max(shape) < vocab)
    if plan.flops_per_token < 3 * multiplied:
        yield f"{plan.flops_per_token:,.0f} flops a token; {multiplied:,} parameters in matrices take 6 each"


#: Fields of a recipe in a config that no track fixes.
FREE = ("kind", "name", "summary", "parent", "revision", "optimizer", "schedule")
#: Folders of science that no track fixes. A test ensures that no other science imports from them.
FREE_FOLDERS = ("speedrun/science/optim/", f"{RECIPES}/")


@check(
    "V507 what the track fixes is the track's",
    before="run",
    why="with another model, loss or batch, the number of steps says nothing about the optimiser",
    hint="change only the optimizer, the schedule and the numbers of steps",
)
def _fixed(record: Record) -> Iterator[str]:
    rules = record.rules.fixed
    if rules is None:
        return
    for run in record.runs:
        problems = (*_settings(run, rules), *_inputs(run, rules))
        yield from (f"{run.folder}: {problem}" for problem in problems)
    yield from _code(record)


def _settings(run: Run, rules: Fixed) -> Iterator[str]:
    found, wanted = leaves(run.start.config.get("recipe")), leaves(rules.recipe)
    for name in sorted({*found, *wanted}):
        if name.partition(".")[0] not in FREE and found.get(name) != wanted.get(name):
            yield f"{name} is {found.get(name)!r}, the track has {wanted.get(name)!r}"


def leaves(tree: Any) -> dict[str, Any]:
    """Return the values in a JSON tree by dotted name, except nulls and numbers of steps."""
    found: dict[str, Any] = {}
    left: list[tuple[str, Any]] = [("", tree)]
    while left:
        name, node = left.pop()
        if isinstance(node, dict | list):
            for key, part in node.items() if isinstance(node, dict) else enumerate(node):
                # Quoted, so that no key hides another.
                quoted = str(key).replace("%", "%25").replace(".", "%2E") or "%"
                left.append((f"{name}.{quoted}" if name else quoted, part))
        elif node is not None and name.rpartition(".")[2] != "num_steps":
            found[name] = node
    return found


def _inputs(run: Run, rules: Fixed) -> Iterator[str]:
    """Compare batch sizes, and the inputs of the model at each share of the training."""
    sizes = {stage["num_sequences"] * stage["seq_len"] for stage in rules.recipe["stages"]}
    for step in run.steps:
        wanted = rules.inputs_at(step.step, run.start.num_steps)
        found = {name: step.inputs.get(name) for name in wanted}
        if found != wanted:
            yield f"step {step.step}: the inputs of the model are {found}, the track has {wanted}"
            return
        if step.batch_tokens not in sizes:
            yield f"step {step.step}: a batch of {step.batch_tokens:,} tokens, the track has {sorted(sizes)}"
            return


def _code(record: Record) -> Iterator[str]:
    """Compare the fixed science with this version, and with the version on which each run's commit is based."""
    texts = {
        path: text
        for path, text in record.source_files.items()
        if is_science(path) and not path.startswith(FREE_FOLDERS)
    }
    bases = {git_history.base(hw.commit) for run in record.runs for hw in run.of(runlog.Preflight)} or {""}
    for path in _of_no_version(texts, bases):
        yield f"{path} is neither of this version nor of one that is known here"
