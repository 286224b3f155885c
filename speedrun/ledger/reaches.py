"""What a Python file imports, and which of its names are not in the lists of `permitted`.

The syntax tree is walked, nothing is executed. Names are compared as text, so each must have one meaning: a module is
never a value, an imported name is bound once, and attributes are set only in `__init__`.
"""

import ast
import builtins
from collections.abc import Iterator
from typing import NamedTuple

from speedrun.ledger.permitted import ATTRIBUTES, BUILTINS, METHODS, MODULES, NEVER, is_permitted

_ALWAYS = frozenset(dir(builtins)) | {"__builtins__", "__file__", "__annotations__", "__debug__", "__dict__"}
_SELF = "self"
#: Libraries read the attributes that it names from a tuple.
_FIELDS = "_fields"
#: Reason for a name that other lists may still permit.
NOT_LISTED = "not on the list"
#: Methods that change their object.
_CHANGES = frozenset(
    ("add", "append", "clear", "discard", "extend", "insert")
    + ("pop", "popitem", "remove", "setdefault", "sort", "update")
)
_FIND_SPEC = "importlib.util.find_spec"


class Reach(NamedTuple):
    """A name that is not permitted, or only if the science itself defines it."""

    line: int
    name: str  #: in full, such as `numpy.load`
    why: str
    attribute: str = ""  #: permitted if the science itself defines this name


class Import(NamedTuple):
    """One name that an import statement binds: `from module import name`, or `import module`."""

    line: int
    module: str
    name: str | None


def imports_of(node: ast.AST) -> Iterator[Import]:
    """Yield what an import statement binds; nothing for other nodes."""
    match node:
        case ast.Import(names=names):
            yield from (Import(node.lineno, alias.name, None) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            start = "." * level + (module or "")
            yield from (Import(node.lineno, start, alias.name) for alias in names)


def names_given(nodes: list[ast.AST]) -> set[str]:
    """Return the names of functions, classes, arguments, variables and attributes that a file defines."""
    given: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                given.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                given.add(name)
    return given


class Reaches:
    """Compares one file with the lists."""

    def __init__(self, nodes: list[ast.AST]) -> None:
        """Prepare for all nodes of a file's tree."""
        self._nodes = nodes
        self._imports = [one for node in nodes for one in imports_of(node)]
        self._stands_for: dict[str, str] = {}
        self._imported_twice: list[Reach] = []
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._note_import(node)
        self._owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        self._called = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
        self._methods = {id(node) for one in nodes if isinstance(one, ast.ClassDef) for node in one.body}
        self._settable = {id(target) for node in nodes for target in _set_in_init(node)}

    def _note_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                bound, full = alias.asname or alias.name, f"{node.module or ''}.{alias.name}"
            else:
                root = alias.name.partition(".")[0]
                bound, full = alias.asname or root, alias.name if alias.asname else root
            if self._stands_for.setdefault(bound, full) != full:
                self._imported_twice.append(Reach(node.lineno, bound, "stands for two things"))

    def found(self) -> Iterator[Reach]:
        """Yield each distinct one once per line."""
        seen: set[Reach] = set()
        parts = (
            self._imported_twice,
            self._imported(),
            (one for node in self._nodes for one in self._of(node)),
        )
        for part in parts:
            for one in part:
                if one not in seen:
                    seen.add(one)
                    yield one

    def _imported(self) -> Iterator[Reach]:
        for one in self._imports:
            full = one.module if one.name is None else f"{one.module}.{one.name}"
            if one.module.startswith(".") or one.name == "*":
                yield Reach(one.line, full, "does not name what it imports")
            elif one.module.partition(".")[0] == "speedrun":
                if one.name is None and one.module != "speedrun":
                    yield Reach(one.line, full, "import the names of our modules, not the modules")
            elif full not in MODULES and not (one.name and is_permitted(one.module, one.name)):
                yield Reach(one.line, full, NOT_LISTED)

    def _of(self, node: ast.AST) -> Iterator[Reach]:
        match node:
            case ast.Name(id=name):
                yield from self._of_name(node, name)
            case ast.Attribute():
                yield from self._of_attribute(node)
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                yield from self._changed(node)
            case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in _CHANGES:
                root, parts = self._path(owner)
                if root is not None and len(parts) < 2 and root.startswith("speedrun."):
                    yield Reach(node.lineno, ".".join([root, *parts, attr]), "changes what others own")
            case ast.MatchClass(kwd_attrs=names):
                yield from (one for name in names for one in _value_attribute(node.lineno, name))
            case ast.ClassDef(keywords=[_, *_]):
                yield Reach(node.lineno, node.name, "a class that something else makes")
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield from self._bound(node, name)
            case ast.AsyncFunctionDef():
                yield Reach(node.lineno, node.name, "nothing waits for it")
            case (
                ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.ExceptHandler(name=str(name))
            ):
                yield from self._bound(node, name)
            case ast.MatchMapping(rest=str(name)):
                yield from self._bound(node, name)

    def _bound(
        self, node: ast.stmt | ast.expr | ast.pattern | ast.arg | ast.ExceptHandler, name: str
    ) -> Iterator[Reach]:
        """Check a name that the file defines. Names of methods cannot shadow imports."""
        if name in self._stands_for and id(node) not in self._methods:
            yield Reach(node.lineno, name, "an imported name that is bound again")
        if name == _SELF and not isinstance(node, ast.arg):
            yield Reach(node.lineno, name, "bound to something else")
        if name.startswith("__") and name.endswith("__") and name not in METHODS:
            yield Reach(node.lineno, name, "a hook of the interpreter")
        if name == _FIELDS:
            yield Reach(node.lineno, name, "names of attributes as strings")

    def _of_name(self, node: ast.Name, name: str) -> Iterator[Reach]:
        if not isinstance(node.ctx, ast.Load):
            yield from self._bound(node, name)
        elif name in self._stands_for:
            full = self._stands_for[name]
            if self._is_module(full) and id(node) not in self._owners:
                yield Reach(node.lineno, full, "a module, handed on")
            elif full == _FIND_SPEC:
                yield from self._of_find_spec(node)
        elif (name in _ALWAYS or name.startswith("__")) and name not in BUILTINS:
            yield Reach(node.lineno, name, NOT_LISTED)

    def _is_module(self, full: str) -> bool:
        return full in MODULES or full == "speedrun" or any(one.module == full for one in self._imports)

    def _path(self, node: ast.AST) -> tuple[str | None, list[str]]:
        """Split `np.add.outer` into `numpy` and [add, outer]; the first is None unless it is an imported name."""
        names: list[str] = []
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute):
                names.append(node.attr)
            node = node.value
        root = self._stands_for.get(node.id) if isinstance(node, ast.Name) else None
        return root, names[::-1]

    def _of_attribute(self, node: ast.Attribute) -> Iterator[Reach]:
        if not isinstance(node.ctx, ast.Load):
            yield from self._changed(node)
            return
        root, names = self._path(node)
        owner = ".".join([root, *names[:-1]]) if root and _is_chain(node) else ""
        full = f"{owner}.{node.attr}"
        if owner in MODULES:
            if full in MODULES:
                if id(node) not in self._owners:
                    yield Reach(node.lineno, full, "a module, handed on")
            elif not is_permitted(owner, node.attr):
                yield Reach(node.lineno, full, NOT_LISTED)
            elif full == _FIND_SPEC:
                yield from self._of_find_spec(node)
        elif node.attr == "__init__" and id(node) in self._called:
            if not _is_super(node.value):
                yield Reach(node.lineno, "(...).__init__", "a hook of the interpreter")
        else:
            yield from _value_attribute(node.lineno, node.attr, full if owner else "")

    def _of_find_spec(self, node: ast.expr) -> Iterator[Reach]:
        """Check `find_spec`: it imports the parents of a dotted name, but only looks up a plain one."""
        match self._called.get(id(node)):
            case ast.Call(args=[ast.Constant(value=str(name))], keywords=[]) if name.isidentifier():
                return
        yield Reach(node.lineno, _FIND_SPEC, "of a name that is not written down")

    def _changed(self, target: ast.Attribute | ast.Subscript) -> Iterator[Reach]:
        """Check a write: items of own objects and, in `__init__`, attributes of `self` may be set."""
        root, names = self._path(target)
        if root is not None:
            yield Reach(target.lineno, ".".join([root, *names]), "changes what others own")
        elif isinstance(target, ast.Attribute) and id(target) not in self._settable:
            yield Reach(target.lineno, f"(...).{target.attr} = ...", "attributes are set in __init__ only")
        elif isinstance(target, ast.Attribute) and target.attr.startswith("__"):
            yield Reach(target.lineno, f"(...).{target.attr} = ...", "a hook of the interpreter")


def _is_chain(node: ast.Attribute) -> bool:
    """Return whether an expression consists of names and dots only."""
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return isinstance(inner, ast.Name)


def _is_super(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="super"), args=[], keywords=[]):
            return True
    return False


def _set_in_init(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the targets of `self.x = ...` in the `__init__` of a class, without nested functions."""
    if not isinstance(node, ast.ClassDef):
        return
    for method in node.body:
        match method:
            case ast.FunctionDef(name="__init__", args=ast.arguments(args=[ast.arg(arg="self"), *_])):
                left: list[ast.AST] = [*method.body]
                while left:
                    inner = left.pop()
                    match inner:
                        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                            yield inner
                        case ast.FunctionDef() | ast.Lambda() | ast.ClassDef():
                            continue
                    left += ast.iter_child_nodes(inner)


def _value_attribute(line: int, attr: str, full: str = "") -> Iterator[Reach]:
    """Check an attribute of something that is no module."""
    shown = full or f"(...).{attr}"
    if attr in ATTRIBUTES and not full.startswith("speedrun."):
        return
    if attr in NEVER or (attr.startswith("__") and attr.endswith("__") and attr not in ATTRIBUTES):
        yield Reach(line, shown, "a way out")
    else:
        yield Reach(line, shown, NOT_LISTED, attr)
