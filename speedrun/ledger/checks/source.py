"""V501 to V506: the source is whole, the harness in it is the harness, and it hides neither reach nor data.

The source is read, never executed: see `ledger.code`.
"""

from collections.abc import Iterator
from math import prod

from speedrun import runlog
from speedrun.ledger import format, history
from speedrun.ledger.checks.table import Skip, check, check_run
from speedrun.ledger.code import MOST_BYTES, Code, is_science, read
from speedrun.ledger.record import Record
from speedrun.ledger.run import Run

_ENTRY = "speedrun/train.py"

#: What files of the harness reach for beyond computing. A new reach is warned of until it stands here.
_MAY: dict[str, str] = {
    "checkpoint.py": "files, computed names, the interpreter, what others own, JAX's own settings, "
    "a package that nobody has looked at, "
    "the inside of modules",
    "clock.py": "clocks",
    "data/inventory.py": "files",
    "data/lock.py": "files, a package that nobody has looked at",
    "data/shards.py": "files, packed data",
    "data/stream.py": "processes",
    "data/synthetic.py": "files",
    "data/wholefile.py": "files",
    "errors.py": "the interpreter",
    "console.py": "the terminal",
    "faults.py": "files, processes, the interpreter",
    "health.py": "processes",
    "kernels/attention_flash3.py": "code, a package that nobody has looked at",
    "kernels/choose.py": "code",
    "mesh.py": "files, processes, the interpreter, computed names, the inside of modules, loaded code, "
    "JAX's own settings",
    "outcome.py": "files",
    "prepare.py": "files",
    "processes.py": "processes, files, loaded code, computed names",
    "provenance.py": "files, processes, code, the machine",
    "recipe.py": "computed names",
    "recipes/__init__.py": "files, code",
    "runlog.py": "files, processes",
    "signals.py": "files, processes, the interpreter, what others own",
    "track.py": "files",
    "loop.py": "JAX's own settings",
    "train.py": "files, the interpreter",
    "watchdog.py": "files, processes",
    "warmup.py": "JAX's own settings",
}
#: What files of older records reached for, too: the loop stood in train.py.
_ONCE: dict[str, str] = {"train.py": "JAX's own settings"}
#: Instruments that science may import: neither knows the time, the data or the log.
_OPEN = ("speedrun.errors", "speedrun.mesh")

#: Of a whole source text. Ours has 0.3 MB of 50 files, which zlib packs into a third.
_MOST_SOURCE_BYTES = 2**20
_MOST_PACKED_BYTES = 150_000
#: Of its science, together: what could hold learned numbers.
_MOST_LITERAL_BYTES = 2**16
_MOST_NUMBERS = 2**12


def _files(record: Record) -> dict[str, Code]:
    """Every file of the source, read.

    Raises:
        Skip: if there is none.
    """
    if not record.source_files:
        raise Skip("source.txt cannot be taken apart: see V003")
    if (size := len(record.raw["source.txt"])) > _MOST_SOURCE_BYTES:
        raise Skip(f"source.txt has {size:,} bytes: see V504")
    return {path: read(path, text) for path, text in record.source_files.items()}


def _is_large(record: Record, path: str) -> bool:
    return len(record.source_files[path].encode(errors="replace")) > MOST_BYTES


@check(
    "V501",
    "the source can be read, and is whole",
    needs=("runs", "source"),
    why="the source is what others read, replay and fork; half of it is none",
    hint="let the harness write source.txt: it follows the import statements",
)
def whole(record: Record) -> Iterator[str]:
    """It parses; it holds the entry point, the recipe, the track, and every file of ours that it imports."""
    files = _files(record)
    for path, code in files.items():
        if code.problem and not _is_large(record, path):  # V504 tells of those
            yield f"{path} cannot be read: {code.problem}"
    for run in record.runs:
        tracks = f"speedrun/tracks/{run.start.track.rpartition('@')[0]}.toml"
        for path in (_ENTRY, f"speedrun/recipes/{run.start.recipe}.py", tracks):
            if path not in files:
                yield f"{run.folder}: ran {path}, which is not there"
        text = record.source_files.get(tracks)
        # Where the track is not known, V006 tells.
        if (
            text is not None
            and record.track is not None
            and format.sha256(text.encode()) != run.start.track_sha256
        ):
            yield f"{run.folder}: {tracks} is not the track that it ran under"
    missing = ((path, line, name) for path, code in files.items() for line, name in _missing(code, files))
    yield from (f"{path} line {line}: imports {name}, which is not there" for path, line, name in missing)


def _missing(code: Code, files: dict[str, Code]) -> Iterator[tuple[int, str]]:
    """Line and name of modules of ours that a file imports, and that are not there."""
    known = {_module(path): other.bound for path, other in files.items() if path.endswith(".py")}
    for line, module, name in code.imports:
        if module.partition(".")[0] != "speedrun":
            continue
        if module not in known:
            yield line, module
        elif name is not None and name not in known[module] and f"{module}.{name}" not in known:
            yield line, f"{module}.{name}"


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@check(
    "V502",
    "the source reaches for nothing it has no business with",
    needs=("source",),
    severity="warning",
    why="a recipe that reads a clock, a file or the network, or that changes the harness, can make up its result",
    hint="leave files, time and log to the harness; what is honest and new belongs into this check's table",
)
def reach(record: Record) -> Iterator[str]:
    """Clocks, sockets, processes, files, pickles, eval, patches: what each file may do stands in one table."""
    for path, code in _files(record).items():
        name = path.removeprefix("speedrun/")
        may = [*_MAY.get(name, "").split(", "), *_ONCE.get(name, "").split(", ")]
        for line, what, reached in code.reaches:
            if what not in may:
                yield f"{path} line {line}: {reached} ({what})"
        for line, module, name in code.imports if is_science(path) else ():
            if not _open_to_science(module, name):
                yield f"{path} line {line}: {module if name is None else f'{module}.{name}'} (an instrument)"


def _open_to_science(module: str, name: str | None) -> bool:
    """Whether an import of ours is one of science, or of the two instruments that are open to it."""
    parts = module.split(".")
    if parts[0] != "speedrun":
        return True
    full = module if len(parts) > 1 else f"speedrun.{name}"
    return is_science(full.replace(".", "/") + ".py") or full in _OPEN


@check(
    "V503",
    "the harness in the source is the harness",
    needs=("runs", "source", "track"),
    why="clock, data and validation are the same for everybody, or no two records compare",
    hint="change recipes, models and kernels; propose changes of the harness by themselves, before the record",
)
def harness(record: Record) -> Iterator[str]:
    """Instruments are, byte by byte, those of this version or those of the commit that the run names.

    An older record differs honestly. Where its commit is known here, it is compared with that; where it is not, nobody
    here can vouch for it: tracks that rank refuse it, others skip the check and say which files differ.
    """
    if not record.source_files:
        raise Skip("source.txt cannot be taken apart: see V003")
    texts = {path: text for path, text in record.source_files.items() if not is_science(path)}
    paths = tuple(texts)
    here = history.files_here(paths)
    tracks = {f"speedrun/tracks/{record.rules.name}.toml"}  # V501 compares it with the run's own digest
    differ = [path for path in paths if here.get(path) != texts[path].encode() and path not in tracks]
    strangers = [path for path in differ if not path.startswith("speedrun/")]
    yield from (f"{path}: no file of the harness" for path in strangers)
    # Of code that was not committed, the commit says nothing.
    commits = sorted(
        {hw.commit * (not hw.dirty) for run in record.finished for hw in run.of(runlog.Preflight)}
    )
    known = [files for commit in commits if (files := history.files_at(commit, paths)) is not None]
    left = [path for path in differ if path not in strangers]
    if known and len(known) == len(commits):
        for path in left:
            if any(files.get(path) != texts[path].encode() for files in known):
                yield f"{path} differs from commit {', '.join(commit[:12] for commit in commits)}"
    elif left and record.rules.rules.ranked:
        yield f"not of this version, and the run's commit is not known here: {_some(left)}"
    elif left and not strangers:
        raise Skip(
            f"{len(left)} of {len(paths)} files are not of this version, and the run's commit is not known here: "
            f"{_some(left)}"
        )


def _some(paths: list[str]) -> str:
    shown = ", ".join(paths[:6])
    return f"{shown}, ..." if len(paths) > 6 else shown


@check(
    "V504",
    "the source carries no weights",
    needs=("source",),
    why="numbers that were learned before the clock are training that nobody timed",
    hint="compute tables from a formula; what is learned has to be learned while the clock runs",
)
def no_weights(record: Record) -> Iterator[str]:
    """No long literals, no rows of numbers, and not too much of them together, however they are spread or hidden."""
    if not record.source_files:
        raise Skip("source.txt cannot be taken apart: see V003")
    if (size := len(record.raw["source.txt"])) > _MOST_SOURCE_BYTES:
        yield f"source.txt has {size:,} bytes; at most {_MOST_SOURCE_BYTES:,} are a text for people"
        return
    files = _files(record)
    for path, code in files.items():
        if _is_large(record, path):
            yield f"{path}: {code.problem}"
        yield from (f"{path} line {line}: {what}" for line, what in code.literals.large)
    science = [code for path, code in files.items() if is_science(path)]
    sums = (
        (
            sum(code.literals.num_bytes for code in science),
            _MOST_LITERAL_BYTES,
            "bytes of literals in the science",
        ),
        (sum(code.literals.num_numbers for code in science), _MOST_NUMBERS, "numbers in the science"),
        (sum(code.packed_bytes for code in files.values()), _MOST_PACKED_BYTES, "bytes in all after zlib"),
    )
    for found, most, what in sums:
        if found > most:
            yield f"{found:,} {what}; at most {most:,}"


@check_run(
    "V505",
    "the state is parameters and their optimiser's",
    needs=("runs", "track"),
    why="a table that is no parameter can remember the training text, and is counted nowhere",
    hint="make it a parameter, or run on a track that declares a larger state",
)
def state(run: Run, record: Record) -> Iterator[str]:
    """Bytes of the state on the devices that share it, against the track's cap for each parameter."""
    (plan,), (hw,) = run.of(runlog.Plan), run.of(runlog.Preflight)
    if (asked := run.start.config.get("replicas", 1)) != hw.num_replicas:
        yield f"its config says {asked!r} replicas, its hardware {hw.num_replicas}"
    if hw.num_replicas < 1 or run.file.num_devices % hw.num_replicas:
        yield f"{run.file.num_devices} devices cannot hold {hw.num_replicas} replicas"
    cap = record.rules.rules.state_bytes_per_param
    held = _held_bytes(run, plan)
    if held > cap * plan.num_params:
        yield (
            f"a state of {held:,} bytes for {plan.num_params:,} parameters; the track allows {cap:g} for each of them"
        )


def _held_bytes(run: Run, plan: runlog.Plan) -> int:
    """One replica of the state, on the devices that share it."""
    (hw,) = run.of(runlog.Preflight)
    return plan.state_bytes_per_device * run.file.num_devices // max(1, hw.num_replicas)


#: The narrowest dtype that parameters are kept in.
_FEWEST_BYTES = 2


@check_run(
    "V506",
    "there are as many parameters as declared",
    why="sizes are how models are compared, and the arithmetic that V209 asks about follows from them",
    hint="let the harness count: it sums the shapes that the recipe's table declares",
)
def parameters(run: Run, record: Record) -> Iterator[str]:
    """The sum of the recorded shapes; one number in all runs; and what state and arithmetic say of it."""
    (plan,) = run.of(runlog.Plan)
    if plan.shapes and (count := sum(map(prod, plan.shapes.values()))) != plan.num_params:
        yield f"says {plan.num_params:,} parameters, its shapes sum to {count:,}"
    (first,) = record.finished[0].of(runlog.Plan)
    if (plan.num_params, plan.shapes) != (first.num_params, first.shapes):
        yield f"has other parameters than {record.finished[0].folder}"
    if _held_bytes(run, plan) < _FEWEST_BYTES * plan.num_params:
        yield f"{plan.num_params:,} parameters do not fit into its state"
    if not 0 < plan.flops_per_token <= 6 * plan.num_params:
        yield f"{plan.flops_per_token:,.0f} flops a token; {plan.num_params:,} parameters make 6 each at most"
