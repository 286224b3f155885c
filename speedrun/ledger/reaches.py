"""What a Python file imports and reaches for: files, the network, clocks, ways to compute a name.

Its tree is walked, nothing is executed. Whoever wants to hide a name must compute it, so every way to compute one is a
thing to report, too.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _by_word(table: dict[str, str]) -> dict[str, str]:
    return {word: reach for reach, words in table.items() for word in words.split()}


#: Packages that compute and nothing else; what they hold besides stands in `_PARTS`.
_PURE = _words(
    "__future__ abc ast bisect collections contextlib copy dataclasses difflib einops enum errno fnmatch fractions "
    "functools hashlib heapq itertools jax math msgspec numbers numpy operator optax random re speedrun "
    "stat statistics string textwrap tomllib types typing typing_extensions zlib"
)
#: What others reach, by their first name; a package that is in neither table is one that nobody has looked at.
_REACH = _by_word(
    {
        "clocks": "time datetime timeit sched calendar",
        "processes": "subprocess multiprocessing signal ctypes cffi _ctypes threading _thread concurrent asyncio "
        "atexit faulthandler resource",
        "the network": "socket ssl urllib http requests aiohttp httpx ftplib smtplib xmlrpc huggingface_hub wandb",
        "pickles": "pickle _pickle marshal shelve dbm copyreg dill cloudpickle joblib torch",
        "files": "os posix io _io pathlib shutil tempfile glob mmap zipfile tarfile sqlite3 fileinput linecache "
        "logging csv",
        "packed data": "base64 binascii codecs gzip lzma bz2 quopri uu struct array",
        "code": "importlib runpy code codeop imp pkgutil builtins zipimport",
        "the interpreter": "sys gc inspect site dis tracemalloc weakref",
        "the machine": "platform",
        "the terminal": "rich click curses readline",
    }
)
#: Many modules hold others by their own names: `dataclasses.sys`. These words are no function's name as well.
_HELD = {
    **{
        word: _REACH[word]
        for word in _REACH.keys() - _words("array code struct platform site signal resource dis csv")
    },
    "Path": "files",
}
#: And these, by the names that everybody gives them.
_KNOWN_AS = {"np": "numpy", "numpy": "numpy", "jnp": "jax.numpy", "jax": "jax"}
_NOTHING = "nothing"
#: Parts of packages that reach further than the package; the longest one counts.
_PARTS = _by_word(
    {
        "files": "numpy.load numpy.save numpy.savez numpy.savez_compressed numpy.fromfile numpy.memmap numpy.loadtxt "
        "numpy.savetxt numpy.genfromtxt numpy.DataSource numpy.lib jax.numpy.load jax.numpy.save jax.numpy.savez "
        "jax.numpy.fromfile jax.profiler tomllib.load hashlib.file_digest",
        "packed data": "numpy.frombuffer numpy.fromstring jax.numpy.frombuffer jax.numpy.fromstring zlib.decompress "
        "zlib.decompressobj",
        "the host": "jax.pure_callback jax.experimental.io_callback jax.debug jax.experimental.host_callback "
        "jax.experimental.buffer_callback",
        "JAX's own settings": "jax.config jax.monitoring jax.transfer_guard jax.log_compiles jax.clear_caches "
        "jax.disable_jit",
        _NOTHING: "jax.experimental.pallas",
        "loaded code": "jax._src jax.extend jax.export jax.lib jax.interpreters jax.experimental numpy.f2py "
        "numpy.testing numpy.ctypeslib numpy._core numpy.core functools.singledispatch functools.singledispatchmethod "
        "typing.get_type_hints typing.ForwardRef types.FunctionType "
        "types.CodeType types.ModuleType importlib.machinery importlib.reload importlib.resources importlib.abc "
        "importlib.util.spec_from_file_location importlib.util.module_from_spec importlib.util.LazyLoader "
        "importlib.__import__",
        "computed names": "operator.attrgetter operator.methodcaller",
        "the network": "jax.distributed",
    }
)
#: Names that Python always has.
_BUILTINS = {
    "open": "files", "input": "files", "breakpoint": "code", "eval": "code", "exec": "code", "compile": "code",
    "__import__": "code", "__builtins__": "code", "__loader__": "code", "__spec__": "code",
    "globals": "computed names", "locals": "computed names", "vars": "computed names", "getattr": "computed names",
    "setattr": "computed names", "delattr": "computed names", "license": "files", "copyright": "files", "help": "code",
}  # fmt: skip
#: Attributes that mean the same whatever they are taken from.
_ATTRIBUTES = {
    "read_bytes": "files", "read_text": "files", "write_bytes": "files", "write_text": "files", "fromfile": "files",
    "memmap": "files", "tofile": "files", "iterdir": "files", "glob": "files", "rglob": "files", "unlink": "files",
    "import_module": "code", "exec_module": "loaded code", "load_module": "loaded code", "environ": "files",
    "spec_from_file_location": "loaded code", "module_from_spec": "loaded code",
    "gi_frame": "the interpreter", "cr_frame": "the interpreter", "ag_frame": "the interpreter",
    "tb_frame": "the interpreter", "f_globals": "the interpreter", "f_builtins": "the interpreter",
    "f_back": "the interpreter", "io_callback": "the host", "pure_callback": "the host",
    "monitoring": "JAX's own settings",
}  # fmt: skip
#: Names between double underscores that are no way into the interpreter.
_PLAIN = _words(
    "__name__ __qualname__ __module__ __doc__ __version__ __file__ __init__ __post_init__ __new__"
)


class Reach(NamedTuple):
    """Something a file reaches for."""

    line: int
    what: str  #: files, clocks, ...
    name: str  #: as it is called in full, `numpy.load`


class Import(NamedTuple):
    """One name that an import statement binds: `from module import name`, or `import module`."""

    line: int
    module: str
    name: str | None


def imports_of(node: ast.AST) -> Iterator[Import]:
    """What an import statement binds; nothing of other nodes."""
    match node:
        case ast.Import(names=names):
            yield from (Import(node.lineno, alias.name, None) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            start = "." * level + (module or "")
            yield from (Import(node.lineno, start, alias.name) for alias in names)


_IMPORT = "importlib.import_module"
#: Modules that are imported by `from`, too.
_MODULES = _words("jax.numpy jax.lax jax.nn jax.random jax.experimental numpy.linalg")
#: Methods that change what they are called on.
_CHANGES = _words("update setdefault pop popitem clear append extend insert remove add discard sort")


class Reaches:
    """Follows names through import statements and plain assignments to what they stand for."""

    def __init__(self, imports: list[Import], nodes: list[ast.AST]) -> None:
        self._imports, self._nodes = imports, nodes
        self._stands_for: dict[str, str] = {}
        for node in nodes:
            match node:
                case ast.Import(names=names):
                    for alias in names:
                        name = alias.name if alias.asname else alias.name.split(".")[0]
                        self._stands_for[alias.asname or name] = name
                case ast.ImportFrom(module=module, names=names):
                    for alias in names:
                        self._stands_for[alias.asname or alias.name] = f"{module or ''}.{alias.name}"
        # A module that is a value goes where no reader follows: a list, a function.
        self._modules = {one.module for one in imports if one.name is None} | _MODULES
        self._owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        self._called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        self._follow_assignments()

    def _follow_assignments(self) -> None:
        """`load = numpy.load`: the name on the left stands for the same thing. Chains of three are long enough."""
        pairs = []
        for node in self._nodes:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() | ast.Attribute() as value)
                    | ast.NamedExpr(target=ast.Name(id=name), value=ast.Name() | ast.Attribute() as value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.Name() | ast.Attribute() as value)
                ):
                    pairs.append((name, value))
        for _ in range(3):
            for name, value in pairs:
                if (full := self._full_name(value)) and name not in self._stands_for:
                    self._stands_for[name] = full

    def _full_name(self, node: ast.AST) -> str | None:
        """`np.lib.format` -> `numpy.lib.format`; None of what does not begin with an imported name."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._stands_for:
            return None
        return ".".join([self._stands_for[node.id], *reversed(names)])

    def found(self) -> Iterator[Reach]:
        """One of a kind in each line."""
        seen: set[tuple[int, str]] = set()
        for one in (*self._imported(), *(found for node in self._nodes for found in self._of(node))):
            if (one.line, one.what) not in seen:
                seen.add((one.line, one.what))
                yield one

    def _imported(self) -> Iterator[Reach]:
        for one in self._imports:
            full = one.module if one.name is None else f"{one.module}.{one.name}"
            if one.module.startswith(".") or one.name == "*":
                yield Reach(one.line, "computed names", full)
            elif what := _reach_of(full, imported=True):
                yield Reach(one.line, what, full)

    def _of(self, node: ast.AST) -> Iterator[Reach]:
        match node:
            case ast.Name(id=name):
                yield from self._of_name(node, name)
            case ast.Attribute(attr=attr):
                yield from self._of_attribute(node, attr)
                yield from self._patched(node)
            case ast.Subscript():
                yield from self._patched(node)
            case ast.Call(func=ast.Attribute(attr=attr) as function) if attr in _CHANGES:
                full = self._full_name(function) or ""
                if full.startswith("speedrun."):
                    yield Reach(node.lineno, "what others own", full)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, *_]) | ast.Match(subject=owner):
                if full := self._full_name(owner):
                    yield Reach(node.lineno, "the inside of modules", full)
            case ast.Call(func=function, args=[argument, *_]) if self._full_name(function) == _IMPORT:
                yield from self._imported_by_name(node, argument)

    def _of_name(self, node: ast.Name, name: str) -> Iterator[Reach]:
        if name in _BUILTINS and name not in self._stands_for:
            yield Reach(node.lineno, _BUILTINS[name], name)
            if name == "getattr" and id(node) not in self._called:
                yield Reach(node.lineno, "the inside of modules", "getattr, handed on")
        elif (full := self._full_name(node)) == _IMPORT and id(node) not in self._called:
            yield Reach(node.lineno, "the inside of modules", "import_module, handed on")
        elif full in self._modules and id(node) not in self._owners:
            yield Reach(node.lineno, "the inside of modules", f"{full}, handed on")

    def _of_attribute(self, node: ast.Attribute, attr: str) -> Iterator[Reach]:
        full = self._full_name(node)
        if full and (what := _reach_of(full, imported=False)):
            yield Reach(node.lineno, what, full)
        elif attr in _ATTRIBUTES:
            yield Reach(node.lineno, _ATTRIBUTES[attr], full or f"(...).{attr}")
            if full == _IMPORT and id(node) not in self._called:
                yield Reach(node.lineno, "the inside of modules", "import_module, handed on")
        elif attr.startswith("__") and attr.endswith("__") and attr not in _PLAIN:
            yield Reach(node.lineno, "computed names", full or f"(...).{attr}")

    def _patched(self, target: ast.Attribute | ast.Subscript) -> Iterator[Reach]:
        """Writing to what was imported: `clock.now = ...`, `os.environ["X"] = ...`."""
        if isinstance(target.ctx, ast.Load):
            return
        inner: ast.AST = target
        while isinstance(inner, ast.Attribute | ast.Subscript):
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self._stands_for:
            whole = target.value if isinstance(target, ast.Subscript) else target
            yield Reach(
                target.lineno, "what others own", self._full_name(whole) or self._stands_for[inner.id]
            )

    def _imported_by_name(self, node: ast.Call, argument: ast.expr) -> Iterator[Reach]:
        """`importlib.import_module("socket")` reaches what `import socket` does."""
        match argument:
            case ast.Constant(value=str(module)):
                if what := _reach_of(module, imported=True):
                    yield Reach(node.lineno, what, module)
            case ast.JoinedStr(values=[ast.Constant(value="speedrun.recipes."), *_]):
                pass
            case _:
                yield Reach(node.lineno, "the inside of modules", "import_module of a computed name")


def _reach_of(name: str, *, imported: bool) -> str | None:
    """What a full name reaches. A name that is only used was imported, so its package is told there."""
    parts = name.split(".")
    for size in range(len(parts), 1, -1):
        if reach := _PARTS.get(".".join(parts[:size])):
            return None if reach == _NOTHING else reach
    for place, part in enumerate(parts[1:], 1):
        if reach := _HELD.get(part) or _HELD.get(part.strip("_")):
            return reach
        if part in _KNOWN_AS and (
            reach := _reach_of(".".join([_KNOWN_AS[part], *parts[place + 1 :]]), imported=False)
        ):
            return reach
    if not imported:
        return None
    return None if parts[0] in _PURE else _REACH.get(parts[0], "a package that nobody has looked at")
