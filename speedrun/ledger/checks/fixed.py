"""V507: where a track fixes model, loss and batch, a record has the track's."""

from collections.abc import Iterator
from typing import Any

from speedrun.ground import runlog
from speedrun.ground.track import Fixed
from speedrun.ledger import history
from speedrun.ledger.checks.table import check
from speedrun.ledger.code import is_science
from speedrun.ledger.record import Record
from speedrun.ledger.run import Run

#: Fields of a described recipe that no track fixes.
FREE = ("kind", "name", "summary", "parent", "revision", "optimizer", "schedule")
#: Folders of science that such a record may change. No other science imports from them, which a test enforces.
FREE_FOLDERS = ("speedrun/science/optim/", "speedrun/science/recipes/")


@check(
    "V507",
    "what the track fixes is the track's",
    needs=("runs", "source", "track"),
    why="with another model, loss or batch, the number of steps says nothing about the optimiser",
    hint="change the optimizer, the schedule and the numbers of steps; all else comes from the track's recipe",
)
def fixed(record: Record) -> Iterator[str]:
    """Compare the config, the inputs of the model, and all science but optimisers and recipes, with the track's."""
    rules = record.rules.fixed
    if rules is None:
        return
    for run in record.runs:
        problems = (*_settings(run, rules), *_inputs(run, rules))
        yield from (f"{run.folder}: {problem}" for problem in problems)
    yield from _code(record)


def _settings(run: Run, rules: Fixed) -> Iterator[str]:
    """Compare the described recipe with the track's, apart from what is free."""
    found = {
        name: value
        for name, value in leaves(run.start.config.get("recipe")).items()
        if name.partition(".")[0] not in FREE
    }
    wanted = leaves(rules.recipe)
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            yield f"{name} is {found.get(name)!r}, the track has {wanted.get(name)!r}"


def leaves(tree: Any) -> dict[str, Any]:
    """Return the values in a JSON tree by dotted name, without nulls and numbers of steps."""
    found: dict[str, Any] = {}
    left = [("", tree)]
    while left:
        name, node = left.pop()
        match node:
            case dict() | list():
                parts = node.items() if isinstance(node, dict) else enumerate(node)
                left += [(f"{name}.{key}" if name else str(key), part) for key, part in parts]
            case value if value is not None and name.rpartition(".")[2] != "num_steps":
                found[name] = value
    return found


def _inputs(run: Run, rules: Fixed) -> Iterator[str]:
    """Compare the size of each batch, and the inputs that the model reads, with the track's at the same progress."""
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
    """Compare the fixed science with this version, and with the one that each run's commit is based on."""
    texts = {
        path: text.encode()
        for path, text in record.source_files.items()
        if is_science(path) and not path.startswith(FREE_FOLDERS)
    }
    here = history.files_here(texts)
    differ = tuple(path for path, text in texts.items() if here.get(path) != text)
    bases = {history.base(hw.commit) for run in record.runs for hw in run.of(runlog.Preflight)} or {""}
    known = [history.files_at(base, differ) or {} for base in bases]
    for path in differ:
        if any(files.get(path) != texts[path] for files in known):
            yield f"{path} is neither of this version nor of one that is known here"
