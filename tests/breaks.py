"""Breaks the science and its scorer on purpose, one place at a time, and says which test notices. Run by hand.

    python tests/breaks.py --seed 0 --number 120 [--only science/kernels/attention.py] [--out table.md]

Breaks are drawn by the seed from the syntax trees of the modules in `TESTS`, as many from each. Each is made in a copy
of the package, and the tests listed for its module run there until one fails. Rows are written as they come; the same
command goes on after the last one.
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

#: Tests of whole programs: the first compiles a recipe of four layers, the others are quick.
_TRACE = "test_recipes.py::test_pinned_traces_stand[smoke]"
_NUMBERS = [
    "test_rungs.py::test_every_number_is_the_published_one[record21]",
    "test_rungs.py::test_rate_and_momentum_are_the_published_ones[record21-708-0.1-300]",
    "test_rungs.py::test_the_window_is_the_published_one[record21-128-14]",
    "test_rungs.py::test_it_has_the_published_number_of_parameters[record21-275598388]",
]
_SETTINGS = [
    "test_recipes.py::test_an_unknown_setting_suggests_only_what_can_be_set",
    "test_recipes.py::test_stages_follow_each_other",
    "test_train.py::test_settings_are_key_and_value_once",
    "test_train.py::test_what_cannot_be_run_is_refused_in_one_line",
]
#: Against the published record: slow, so last.
_GOLDEN = [
    "test_golden.py::test_windows_grow_as_in_the_file",
    "test_golden.py::test_the_first_losses_and_gradients_agree",
]
_SMALLEST = "test_recipes.py::test_the_smallest_model_and_the_smallest_run_may_be_made"
_FORMS = "test_attention.py::TestForms::test_float32"
#: By module, the tests that cover it: the quickest and likeliest first.
TESTS = {
    "science/models/record21_model.py": [*_NUMBERS, *_SETTINGS, _TRACE, "test_step.py", _SMALLEST, *_GOLDEN],
    "science/nn.py": ["test_nn.py", _TRACE, "test_qk_norm.py", *_GOLDEN],
    "science/kernels/attention.py": [
        "test_attention.py::test_visibility_is_the_rule",
        "test_attention.py::test_attention_is_a_softmax_over_visible_keys",
        _TRACE,
        "test_program.py::test_a_validation_has_the_window_of_its_own_step",
        "test_attention.py::test_a_short_window_is_half_a_long_one_rounded_down_and_at_least_one",
        f"{_FORMS.replace('float32', 'bfloat16')}[definition]",
        *_GOLDEN,
    ],
    "science/kernels/attention_banded.py": [
        f"{_FORMS}[banded in small tiles-mixed documents]",
        *(f"{_FORMS}[banded-{case}]" for case in ("odd length", "window longer than the sequence")),
        "test_attention.py::test_banded_says_when_its_bound_is_too_small",
        "test_attention.py::test_the_default_tile_is_half_the_bound_and_never_tiny",
        "test_attention.py::test_banded_memory_is_linear_in_time",
        *_GOLDEN,
    ],
    "science/kernels/cross_entropy.py": [
        "test_several_targets.py",
        "test_cross_entropy.py",
        "test_recipes.py",
        *_GOLDEN,
    ],
    "science/kernels/choose.py": [
        "test_attention.py::test_auto_says_what_it_chose_and_why",
        "test_attention.py::test_a_form_that_cannot_run_gives_all_reasons",
        "test_attention.py::test_a_form_is_given_what_it_needs",
        "test_attention.py::test_every_choice_of_a_program_is_kept",
        "test_qk_norm.py::test_auto_says_what_it_chose_and_why",
        "test_qk_norm.py::test_a_form_that_cannot_run_gives_all_reasons_and_the_choice_is_kept",
        "test_attention.py::test_the_definition_is_refused_above_its_memory",
        "test_attention.py::test_a_program_has_room_for_64_documents_a_row_or_one_for_32_tokens",
        "test_cross_entropy.py::test_the_head_takes_as_few_chunks_as_fit",
    ],
    "science/optim/groups.py": [
        "test_muon.py::test_adam_keeps_moments_in_16_bits_and_computes_in_float32",
        *_NUMBERS,
        _TRACE,
        "test_recipes.py::test_record_21_keeps_its_tables_and_their_moments_in_16_bits",
        *_GOLDEN,
    ],
    "science/optim/orthogonal.py": ["test_muon.py", *_NUMBERS, _TRACE, *_GOLDEN],
    "science/optim/banks.py": ["test_muon.py", *_NUMBERS, _TRACE, *_GOLDEN],
    "science/optim/schedules.py": [*_NUMBERS, *_SETTINGS, _SMALLEST, _TRACE, "test_rungs.py", *_GOLDEN],
    "science/params.py": ["test_params.py", *_NUMBERS, _TRACE, "test_step.py", *_GOLDEN],
    "science/recipe.py": [
        *_SETTINGS,
        *_NUMBERS,
        "test_program.py",
        _SMALLEST,
        "test_recipes.py",
        "test_contract.py",
        *_GOLDEN,
    ],
    "science/step.py": [
        "test_step.py::test_the_first_parameter_with_a_bad_gradient_is_named",
        "test_step.py::test_every_parameter_moves_no_two_start_equal_and_padding_never_moves",
        "test_step.py::test_parameters_and_optimiser_state_are_divided_by_eight",
        "test_step.py::test_a_step_takes_the_mean_gradient_of_all_devices_and_carries_on",
        "test_step.py::test_parameters_travel_in_16_bits_and_are_summed_and_updated_in_32",
        _TRACE,
        "test_step.py::test_devices_and_accumulation_do_not_matter",
        "test_step.py::test_nodes_exchange_the_parts_of_gradients_and_nothing_else",
        "test_program.py::test_a_validation_has_the_window_of_its_own_step",
        *_GOLDEN,
    ],
    "train/scorer.py": ["test_program.py"],
    "train/validation.py": ["test_program.py", "test_train.py"],
    "train/program.py": [
        "test_step.py::test_what_devices_cannot_share_is_refused_with_what_to_type",
        "test_program.py",
        "test_step.py",
        "test_contract.py",
        "test_footprint.py",
        "test_exports.py",
    ],
    "data/stream.py": ["test_stream.py"],
}

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
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
        self.sound: set[str] = set()  #: tests that pass where nothing is broken
        self.unsound: set[str] = set()
        for part in ("speedrun", "tests"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def verdict(self, one: Break, tests: list[str]) -> str:
        """Which of the tests notices a break; one that fails without it, too, is left out."""
        path = self.folder / "speedrun" / one.module
        source = path.read_bytes()
        while True:
            path.write_bytes(one.apply(source))
            found = self._run(tests)
            path.write_bytes(source)
            if "::" not in found or found in self.sound:
                return found
            (self.sound if self._run([found]) == "survived" else self.unsound).add(found)
            if found in self.sound:
                return found

    def _run(self, tests: list[str]) -> str:
        """The first test that fails, "survived" or "timeout"."""
        options = ["-x", "-q", "-rfE", "-n", "0", "-p", "no:cacheprovider"]
        options += [f"--deselect=tests/{test}" for test in self.unsound]
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


def prepare(cache: Path) -> None:
    """One thread, and programs that are not compiled twice."""
    os.nice(15)
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_multi_thread_eigen=false"
    )
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1", "OMP_NUM_THREADS": "1"}


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
        prepare(Path(folder) / "programs")
        bench = Bench(Path(folder), args.timeout_s)
        if not done:
            print("| place | break | noticed by | s |\n|---|---|---|---|", file=table, flush=True)
        for one in drawn:
            if str(one) not in done:
                started = time.monotonic()
                found = bench.verdict(one, TESTS[one.module])
                print(f"| {one} | {found} | {time.monotonic() - started:.0f} |", file=table, flush=True)


if __name__ == "__main__":
    main()
