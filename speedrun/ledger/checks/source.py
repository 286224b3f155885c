"""V501 to V506: the source is complete, its harness is unchanged, and its science hides neither access nor data.

The source is parsed and never executed: see `ledger.code`.
"""

import zlib
from collections.abc import Iterable, Iterator
from math import prod

from speedrun.ground import provenance, runlog
from speedrun.ledger import format, history
from speedrun.ledger.checks.environment import LOCK
from speedrun.ledger.checks.table import Skip, check, check_run
from speedrun.ledger.code import MOST_BYTES, SCIENCE, Code, is_science, read
from speedrun.ledger.literals import Literals
from speedrun.ledger.permitted import ATTRIBUTES, MODULES
from speedrun.ledger.reaches import NOT_LISTED
from speedrun.ledger.record import Record
from speedrun.ledger.run import Run

#: Entry point and folder of recipes: of this layout, and of the one before 2026-11-22.
_PLACES = (
    ("speedrun/training/train.py", "speedrun/science/recipes"),
    ("speedrun/train.py", "speedrun/recipes"),
)

#: Science that needs names which are not on the list: settings by name, kernels from a wheel. Accepted as it is in this
#: version, and in older records by the first 16 digits of its sha256.
_REVIEWED: dict[str, frozenset[str]] = {
    "speedrun/recipe.py": frozenset({"eb9cfb78a0f47f0c", "ef6e66ca208200a1"}),
    "speedrun/kernels/attention_flash3.py": frozenset({"8dfb05af037a80ca", "e08f3b818d6114b7"}),
    "speedrun/science/recipe.py": frozenset({"5d7df790fbb99012"}),
    "speedrun/science/kernels/attention_flash3.py": frozenset({"52aa490a1730a6f0"}),
}
#: Instruments that science may import: they give no access to time, data or log.
_OPEN = tuple(
    f"speedrun.{name}" for name in ("ground.errors", "ground.limits", "ground.mesh", "errors", "mesh")
)
#: Packages of which only listed names may be used.
_LISTED = {module.partition(".")[0] for module in MODULES} | {"jaxlib", "msgspec", "orbax_checkpoint"}

#: Limits of a whole source text. Ours has 0.3 MB in 50 files, and a third of that after zlib.
_MOST_SOURCE_BYTES = 2**20
_MOST_PACKED_BYTES = 150_000
#: Limits of its science, which could hide learned numbers even in names and the order of lines. Ours has 54,000 to
#: 69,000 bytes after zlib (record 21, record 89), 3,600 bytes of literals, and 400 numbers.
_MOST_SCIENCE_BYTES = 80_000
_MOST_LITERAL_BYTES = 2**14
_MOST_NUMBERS = 2**10
_MOST_SETTINGS, _MOST_SETTINGS_BYTES = 256, 2**13  #: record 89 has 143 numbers in 3,965 bytes
#: Limit of its docstrings and comments after zlib: English shrinks to a third, learned numbers do not. Ours: 14,000.
_MOST_PROSE_BYTES = 24_000


def _files(record: Record) -> dict[str, Code]:
    """Read every file of the source.

    Raises:
        Skip: if there is none, or the text is too large.
    """
    _need_source(record)
    if (size := len(record.raw["source.txt"])) > _MOST_SOURCE_BYTES:
        raise Skip(f"source.txt has {size:,} bytes: see V504")
    return {path: read(path, text) for path, text in record.source_files.items()}


def _need_source(record: Record) -> None:
    if not record.source_files:
        raise Skip("source.txt cannot be split: see V003")


def _is_large(record: Record, path: str) -> bool:
    return len(record.source_files[path].encode(errors="replace")) > MOST_BYTES


@check(
    "V501",
    "the source can be read, and is complete",
    needs=("runs", "source"),
    why="others read, replay and fork the source, so all of it must be there",
    hint="let the harness write source.txt from the import statements",
)
def whole(record: Record) -> Iterator[str]:
    """It parses, and holds the entry point, the recipe, the track and every file of ours that it imports."""
    files = _files(record)
    for path, code in files.items():
        if code.problem and not _is_large(record, path):  # V504 reports those
            yield f"{path} cannot be read: {code.problem}"
    for run in record.runs:
        tracks = f"speedrun/tracks/{run.start.track.rpartition('@')[0]}.toml"
        entry, recipes = next((place for place in _PLACES if place[0] in files), _PLACES[0])
        for path in (entry, f"{recipes}/{run.start.recipe}.py", tracks):
            if path not in files:
                yield f"{run.folder}: ran {path}, which is missing"
        text = record.source_files.get(tracks)
        # V006 reports unknown tracks.
        if (
            text is not None
            and record.track is not None
            and format.sha256(text.encode()) != run.start.track_sha256
        ):
            yield f"{run.folder}: {tracks} is not the track that it ran under"
    yield from (f"{path} is of another layout than the entry" for path in _of_another_layout(files))
    missing = ((path, line, name) for path, code in files.items() for line, name in _missing(code, files))
    yield from (f"{path} line {line}: imports {name}, which is missing" for path, line, name in missing)


def _of_another_layout(files: Iterable[str]) -> list[str]:
    """Return science that the entry point does not run: a decoy for readers of the source."""
    is_new = _PLACES[0][0] in files
    return [path for path in files if is_science(path) and path.startswith(SCIENCE) != is_new]


def _missing(code: Code, files: dict[str, Code]) -> Iterator[tuple[int, str]]:
    """Yield line and name of modules of ours that a file imports, and that are missing."""
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
    "the science names only what computes",
    needs=("runs", "source"),
    severity="warning",
    why="a recipe that reads a clock, a file or the network, or changes the harness, can fake its result",
    hint="remove what the line names: a recipe may use what speedrun/ledger/permitted.py lists; propose additions",
)
def reach(record: Record) -> Iterator[str]:
    """Compare modules, functions and attributes with the list of permitted ones. V503 compares instruments."""
    files = _files(record)
    given = set().union(*(code.given for path, code in files.items() if is_science(path)))
    modules = {_module(path): code for path, code in files.items() if path.endswith(".py")}
    packages = _packages(record)
    for path, code in files.items():
        if not is_science(path) or _is_reviewed(path, record.source_files[path]):
            continue
        for one in code.reaches:
            package, _, rest = one.name.partition(".")
            if package == "speedrun":
                permitted = _is_ours(one.name, modules, one.attribute, given)
            else:
                permitted = one.attribute in given or (package in packages and not rest.startswith("_"))
            if one.why != NOT_LISTED or not permitted:
                yield f"{path} line {one.line}: {one.name} ({one.why})"
        for line, module, name in code.imports:
            if not _open_to_science(module, name):
                yield f"{path} line {line}: {module if name is None else f'{module}.{name}'} (an instrument)"
            elif module.startswith("speedrun") and not _is_ours(f"{module}.{name}", modules, "", given):
                yield f"{path} line {line}: {module}.{name} (not defined there)"


def _open_to_science(module: str, name: str | None) -> bool:
    """Return whether science may import a module: not ours, science, or one of two instruments."""
    if module.partition(".")[0] != "speedrun":
        return True
    named = (module, f"{module}.{name}")
    return any(one in _OPEN or is_science(one.replace(".", "/") + ".py") for one in named)


def _is_reviewed(path: str, text: str) -> bool:
    raw = text.encode(errors="replace")
    if path not in _REVIEWED:
        return False
    return format.sha256(raw)[:16] in _REVIEWED[path] or history.files_here([path]).get(path) == raw


def _is_ours(name: str, modules: dict[str, Code], attribute: str, given: set[str]) -> bool:
    """Return whether a full name of ours is a module, defined in one, or an attribute of such a definition."""
    parts = name.split(".")
    size = next(size for size in range(len(parts), -1, -1) if ".".join(parts[:size]) in modules or not size)
    inside = parts[size:]
    code = modules.get(".".join(parts[:size]))
    if not inside or code is None or inside[0] not in code.bound:  # V501 reports missing names
        return True
    if inside[0] not in code.defined:
        return False
    return len(inside) == 1 or attribute in given or attribute in ATTRIBUTES


def _packages(record: Record) -> set[str]:
    """Return further packages that may be used: every run names them, and its lock file pins them."""
    named: list[set[str]] = []
    for run in record.runs:
        for hw in run.of(runlog.Preflight):
            lock = history.files_here([f"requirements/{hw.lock}"]) if LOCK.fullmatch(hw.lock) else {}
            pins = set().union(*(provenance.pinned(text.decode(errors="replace")) for text in lock.values()))
            named.append({name.replace("-", "_").lower() for name in hw.software if name in pins})
    return set.intersection(*named) - _LISTED if named else set()


@check(
    "V503",
    "the harness in the source is the harness",
    needs=("runs", "source", "track"),
    why="records are comparable only with the same clock, data and validation",
    hint="change only the science; propose changes of the harness separately, before the record",
)
def harness(record: Record) -> Iterator[str]:
    """Instruments are, byte for byte, those of this version or of the commit that the run names.

    Where that commit is unknown, tracks that rank refuse files that differ from this version; others skip the check.
    """
    _need_source(record)
    texts = {path: text for path, text in record.source_files.items() if not is_science(path)}
    paths = tuple(texts)
    here = history.files_here(paths)
    tracks = {f"speedrun/tracks/{record.rules.name}.toml"}  # V501 compares it with the run's digest
    differ = [path for path in paths if here.get(path) != texts[path].encode() and path not in tracks]
    strangers = [path for path in differ if not path.startswith("speedrun/")]
    yield from (f"{path}: not a file of the harness" for path in strangers)
    # A commit says nothing about uncommitted code.
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
    why="numbers learned before the clock started are untimed training",
    hint="compute tables from formulas; learn everything else while the clock runs",
)
def no_weights(record: Record) -> Iterator[str]:
    """Limit long literals, rows of numbers, and the amount of data in source and settings, however it is spread."""
    _need_source(record)
    if (size := len(record.raw["source.txt"])) > _MOST_SOURCE_BYTES:
        yield f"source.txt has {size:,} bytes; at most {_MOST_SOURCE_BYTES:,} are permitted"
        return
    files = _files(record)
    for path, code in files.items():
        if _is_large(record, path):
            yield f"{path}: {code.problem}"
        yield from (f"{path} line {line}: {what}" for line, what in code.literals.large)
    science = [code for path, code in files.items() if is_science(path)]
    for one in map(_settings, record.finished):
        yield from (f"settings: {what}" for _, what in one.large)
        if one.num_numbers > _MOST_SETTINGS or one.num_bytes > _MOST_SETTINGS_BYTES:
            got = f"{one.num_numbers:,} numbers and {one.num_bytes:,} bytes in the settings"
            yield f"{got}; at most {_MOST_SETTINGS} and {_MOST_SETTINGS_BYTES:,}"
    literals = [code.literals for code in science]
    sums = (
        (sum(one.num_bytes for one in literals), _MOST_LITERAL_BYTES, "bytes of literals in the science"),
        (sum(one.num_numbers for one in literals), _MOST_NUMBERS, "numbers in the science"),
        (
            len(zlib.compress("\n".join(code.prose for code in science).encode(errors="replace"), 6)),
            _MOST_PROSE_BYTES,
            "bytes of docstrings and comments in the science, after zlib",
        ),
        (sum(code.packed_bytes for code in science), _MOST_SCIENCE_BYTES, "bytes of science after zlib"),
        (sum(code.packed_bytes for code in files.values()), _MOST_PACKED_BYTES, "bytes in all after zlib"),
    )
    for found, most, what in sums:
        if found > most:
            yield f"{found:,} {what}; at most {most:,}"


def _settings(run: Run) -> Literals:
    """Measure a recipe's settings, which the source has too unless `--set` brought them."""
    found = Literals()
    found.note_data([run.start.config, run.start.overrides])
    return found


@check_run(
    "V505",
    "the state holds parameters and optimiser state only",
    needs=("runs", "track"),
    why="a table that is no parameter can memorise the training text without being counted",
    hint="make it a parameter, or run on a track that permits a larger state",
)
def state(run: Run, record: Record) -> Iterator[str]:
    """Compare the bytes of the state with the track's cap per parameter."""
    (plan,), (hw,) = run.of(runlog.Plan), run.of(runlog.Preflight)
    if (replicas := run.start.config.get("replicas", 1)) != hw.num_replicas:
        yield f"its config says {replicas!r} replicas, its hardware {hw.num_replicas}"
    if hw.num_replicas < 1 or run.preflight.num_devices % hw.num_replicas:
        yield f"{run.preflight.num_devices} devices cannot hold {hw.num_replicas} replicas"
    cap = record.rules.rules.state_bytes_per_param
    held = _held_bytes(run, plan)
    if held > cap * plan.num_params:
        yield (
            f"a state of {held:,} bytes for {plan.num_params:,} parameters; the track permits {cap:g} for each"
        )


def _held_bytes(run: Run, plan: runlog.Plan) -> int:
    """Return the bytes of one replica of the state."""
    (hw,) = run.of(runlog.Preflight)
    return plan.state_bytes_per_device * run.preflight.num_devices // max(1, hw.num_replicas)


#: Bytes of the narrowest dtype of parameters.
_FEWEST_BYTES = 2


@check_run(
    "V506",
    "the number of parameters is right",
    needs=("runs", "track"),
    why="models are compared by size, and the flops that V209 checks follow from it",
    hint="let the harness sum the shapes that the recipe's table declares",
)
def parameters(run: Run, record: Record) -> Iterator[str]:
    """Compare the number with the recorded shapes, other runs, the size of the state, and the flops."""
    (plan,) = run.of(runlog.Plan)
    if plan.shapes and (count := sum(map(prod, plan.shapes.values()))) != plan.num_params:
        yield f"says {plan.num_params:,} parameters, its shapes sum to {count:,}"
    (first,) = record.finished[0].of(runlog.Plan)
    if (plan.num_params, plan.shapes) != (first.num_params, first.shapes):
        yield f"has other parameters than {record.finished[0].folder}"
    if _held_bytes(run, plan) < _FEWEST_BYTES * plan.num_params:
        yield f"{plan.num_params:,} parameters do not fit into its state"
    if not 0 < plan.flops_per_token <= 6 * plan.num_params:
        yield f"{plan.flops_per_token:,.0f} flops a token; {plan.num_params:,} parameters take at most 6 each"
    # Every matrix but tables takes 6 flops per parameter and token, forward and backward. Half of that allows for small
    # tables.
    vocab = record.rules.data.vocab_size
    multiplied = sum(prod(shape) for shape in plan.shapes.values() if len(shape) > 1 and max(shape) < vocab)
    if plan.flops_per_token < 3 * multiplied:
        yield f"{plan.flops_per_token:,.0f} flops a token; {multiplied:,} parameters in matrices take 6 each"
