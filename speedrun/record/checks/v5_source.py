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
from speedrun.record.checks.table import Skip, at_most, check, check_run, if_ranked, same
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
        tracks = _track_file(files, run.start.track.rpartition("@")[0])
        package, recipe = (f"{RECIPES}/{run.start.recipe}{end}" for end in ("/__init__.py", ".py"))
        for path in (_ENTRY, package if package in files else recipe, tracks):
            if path not in files:
                yield f"{run.folder}: ran {path}, which is missing"
        # V006 reports unknown tracks.
        other = record.track is not None and tracks in files
        if other and layout.sha256(files[tracks].encode()) != run.start.track_sha256:
            yield f"{run.folder}: ran on another track than {tracks}"
    yield from _unreadable_and_missing(files)


def _track_file(files: dict[str, str], name: str) -> str:
    """Return the path of a track: in the package, else in the room whose runs it is for."""
    own, rest = f"speedrun/tracks/{name}.toml", f"/tracks/{name}.toml"
    of_rooms = (path for path in sorted(files) if path.startswith("speedrun/") and path.endswith(rest))
    return own if own in files else next(of_rooms, own)


def _unreadable_and_missing(files: dict[str, str]) -> Iterator[str]:
    """Report files that do not parse, and imports of missing modules or names of this package."""
    names: dict[str, Names] = {}
    paths = [path for path in files if path.endswith(".py")]
    for path in paths:
        if _module(path) in names:
            yield f"{path} is not the only file of its module"
        try:
            names[_module(path)] = read(files[path])
        except ValueError as error:
            names[_module(path)] = Names([], set())
            yield f"{path} cannot be read: {error}"
    for path in paths:
        for line, module, name in names[_module(path)].imports:
            full = module if name is None else f"{module}.{name}"
            here = full in names or (module in names and name in names[module].bound)
            if module.partition(".")[0] in ("", "speedrun") and not here:  # relative ones name no module
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
    rules = _track_file(record.source_files, record.rules.name)  # V501 compares it with the run's digest
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
    yield same("replicas in its config", run.start.config.get("replicas", 1), hw.num_replicas)
    yield same(f"devices in no replica of {hw.num_replicas}", hw.num_devices % hw.num_replicas, 0)
    max_bytes = record.rules.rules.state_bytes_per_param * plan.num_params
    yield at_most(f"bytes for {plan.num_params:,} parameters", _held_bytes(run, plan), max_bytes)


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
    (plan,), first = run.of(runlog.Plan), record.finished[0]
    (theirs,) = first.of(runlog.Plan)
    shapes, size, flops = plan.shapes.values(), plan.num_params, plan.flops_per_token
    yield same("parameters, by its shapes", size, sum(map(prod, shapes)))
    if (most := record.rules.rules.most_params) is not None:
        yield at_most("parameters", size, most)
    yield same(f"parameters, as in {first.folder}", (size, plan.shapes), (theirs.num_params, theirs.shapes))
    yield at_most("bytes of parameters, in its state", _FEWEST_BYTES * size, _held_bytes(run, plan))
    if not 0 < flops <= 6 * size:
        yield f"{flops:,.0f} flops a token; {size:,} parameters take at most 6 each"
    # Matrices except tables take 6 flops per parameter and token, forward and backward. Half allows for small tables.
    vocab = record.rules.data.vocab_size
    multiplied = sum(prod(shape) for shape in shapes if len(shape) > 1 and max(shape) < vocab)
    yield at_most("flops of matrices, of those a token", 3 * multiplied, flops)


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
        problems = filter(None, (*_settings(run, rules), *_inputs(run, rules)))
        yield from (f"{run.folder}: {problem}" for problem in problems)
    yield from _code(record)


def _settings(run: Run, rules: Fixed) -> Iterator[str]:
    found, wanted = leaves(run.start.config.get("recipe")), leaves(rules.recipe)
    for name in sorted({*found, *wanted}):
        if name.partition(".")[0] not in FREE:
            yield same(name, found.get(name), wanted.get(name))


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
            yield same(f"step {step.step}: the inputs of the model", found, wanted)
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
