"""Breaks the science and its scorer on purpose, one place at a time, and says which test notices. Run by hand.

    python tests/breaks.py --seed 0 --number 120 [--only science/kernels/attention.py] [--out table.md]

Breaks are drawn by the seed from the syntax trees of the modules in `TESTS`, as many from each. Each is made in a copy
of the package. The tests of its module run there, then those of whole programs, until one fails. Rows are written as
they come; the same command goes on after the last one.
"""

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent

#: Tests of whole programs, the quickest first. Those against the published records are slow, so last.
PROGRAMS = ["test_rungs.py", "test_recipes.py", "test_train.py", "test_step.py", "test_program.py"]
PROGRAMS += ["test_golden.py", "test_golden89.py"]
#: By module, the tests of its own, which run before those.
TESTS = {
    "science/models/record21_model.py": [],
    "science/nn.py": ["test_nn.py", "test_qk_norm.py"],
    "science/kernels/attention.py": ["test_attention.py"],
    "science/kernels/attention_banded.py": ["test_attention.py"],
    "science/kernels/cross_entropy.py": ["test_several_targets.py", "test_cross_entropy.py"],
    "science/kernels/choose.py": ["test_qk_norm.py", "test_cross_entropy.py", "test_attention.py"],
    "science/optim/groups.py": ["test_muon.py"],
    "science/optim/orthogonal.py": ["test_muon.py"],
    "science/optim/normuon_and_adam.py": ["test_muon.py"],
    "science/optim/banks.py": ["test_muon.py"],
    "science/optim/schedules.py": [],
    "science/params.py": ["test_params.py"],
    "science/recipe.py": ["test_contract.py"],
    "science/rows.py": ["test_rows.py"],
    "science/masks.py": ["test_masks.py"],
    "science/step.py": ["test_step.py", "test_program.py", "test_rows.py"],
    "train/program.py": ["test_program.py", "test_footprint.py", "test_contract.py"],
    "data/stream.py": ["test_stream.py"],
}
_RECORD92 = [
    "recipes/record92.py",
    *(f"science/models/record92_{part}.py" for part in ("model", "table", "tokens")),
]
_RECORD92 += [f"science/optim/{name}.py" for name in ("anvil", "averages", "row_adam")]
TESTS |= {module: ["test_record92.py", "test_golden92.py"] for module in _RECORD92}

COMPARISONS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
COMPARISONS |= {other: one for one, other in COMPARISONS.items()}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
NAMES |= {"sin": "cos", "cos": "sin", "ceil": "floor"}
AXES = {"0": "1", "1": "0", "-1": "-2"}
#: Texts, types and what only refuses input with a message.
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


class Break(NamedTuple):
    """One place in one module, and what is written there instead."""

    module: str
    line: int
    column: int
    start: int  #: bytes
    stop: int
    old: str
    new: str

    def __str__(self) -> str:
        cells = (f"`{' '.join(text.split())}`".replace("|", "\\|") for text in (self.old, self.new))
        return f"{self.module}:{self.line}:{self.column} | {' to '.join(cells)}"

    def apply(self, source: bytes) -> bytes:
        """The module with the break in it."""
        return source[: self.start] + f"({self.new})".encode() + source[self.stop :]


def code(node: ast.AST) -> Iterator[ast.AST]:
    """A tree without annotations, decorators, texts and messages."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "keywords"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, LEFT_OUT):
                    yield from code(child)
        elif name == "keywords":
            for child in value:
                yield from code(child.value)


def instead(node: Any) -> list[str]:
    """What could stand in a node's place: wrong, and likely to run."""
    match node:
        case ast.Constant(value=int() | float() as x) if not isinstance(x, bool):
            return [repr(x * 2), repr(x + 1), repr(-x)] if x else ["1"]
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            return [ast.unparse(ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators))]
        case ast.BinOp() if type(node.op) in OPERATORS:
            swapped = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
            return [ast.unparse(part) for part in (swapped, node.left, node.right)]
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return [ast.unparse(ast.BoolOp(other, node.values))]
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            return [ast.unparse(node.operand)]
        case ast.IfExp():
            return [ast.unparse(ast.IfExp(node.test, node.orelse, node.body))]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in NAMES:
            return [ast.unparse(node).replace(name, NAMES[name], 1)]
        case ast.Call(args=[ast.Name() as first, ast.Name() as second, *rest]) if (
            kind(first) == kind(second) != ""
        ):
            return [ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))]
    return []


def kind(name: ast.Name) -> str:
    """The shape that a name ends with, or nothing."""
    shape = name.id.rpartition("_")[2]
    return shape if shape.isupper() else ""


def breaks_of(module: str) -> Iterator[list[Break]]:
    """All breaks of a module, place by place."""
    source = (ROOT / "speedrun" / module).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    axes = {id(k.value) for call in calls for k in call.keywords if k.arg == "axis"}
    for node in code(tree):
        if isinstance(node, ast.expr):
            old = ast.unparse(node)
            news = [AXES[old]] if id(node) in axes and old in AXES else instead(node)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            if news:
                yield [Break(module, node.lineno, node.col_offset + 1, start, stop, old, new) for new in news]


def draw(seed: int, modules: list[str]) -> Iterator[Break]:
    """One from each module in turn; each place at most once."""
    queues = []
    for module in modules:
        rng = random.Random(f"{seed} {module}")
        places = list(breaks_of(module))
        rng.shuffle(places)
        queues.append([rng.choice(place) for place in places])
    return (one for one in chain(*zip_longest(*queues)) if one)


class Bench:
    """A copy of the package, to test it in."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        for part in ("speedrun", "tests"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def verdict(self, one: Break, tests: list[str]) -> str:
        """Which of the tests notices a break; it must pass without it."""
        path = self.folder / "speedrun" / one.module
        source = path.read_bytes()
        path.write_bytes(one.apply(source))
        found = self._run(tests)
        path.write_bytes(source)
        return (
            found if "::" not in found or self._run([found]) == "survived" else f"{found}, which never passes"
        )

    def _run(self, tests: list[str]) -> str:
        """The first test that fails, "survived" or "timeout"."""
        options = ["-x", "-q", "-rfE", "-n", "0", "-p", "no:cacheprovider"]
        argv = [sys.executable, "-B", "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
        with (self.folder / "output").open("w") as output:
            child = subprocess.Popen(
                argv, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = child.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return "timeout"
        said = (self.folder / "output").read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) tests/(.*?)(?: - .*)?$", said, re.MULTILINE)
        return failed[1] if failed else f"ended with {code}" if code else "survived"


def main() -> None:
    """Draws, breaks, and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=120)
    parser.add_argument("--only", choices=TESTS)
    parser.add_argument("--out", type=Path, default=Path("breaks.md"))
    parser.add_argument("--timeout-s", type=float, default=600)
    args = parser.parse_args()
    drawn = list(islice(draw(args.seed, [args.only] if args.only else [*TESTS]), args.number))
    done = args.out.read_text() if args.out.exists() else ""
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder, args.out.open("a") as table:
        os.nice(15)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/programs")
        bench = Bench(Path(folder), args.timeout_s)
        if not done:
            print("| place | break | noticed by | s |\n|---|---|---|---|", file=table, flush=True)
        for one in drawn:
            if str(one) not in done:
                started = time.monotonic()
                tests = dict.fromkeys([*TESTS[one.module], *PROGRAMS])
                found = bench.verdict(one, [*tests])
                print(f"| {one} | {found} | {time.monotonic() - started:.0f} |", file=table, flush=True)


if __name__ == "__main__":
    main()
