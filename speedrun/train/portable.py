"""Turns an exported program into StableHLO for one device, which StableHLO promises to read for five years.

`jax.export` promises its own files for half a year. What it wraps around StableHLO goes: of a program for several
devices, the body of its one `shard_map` stays, whose collectives are explicit; of others, where results lie. Composites
become calls of what they are made of.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import export
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import chlo, func, sdy, stablehlo
from jax.sharding import PartitionSpec as P

from speedrun.base.errors import UsageError
from speedrun.record.archive import Array, Portable
from speedrun.record.layout import sha256

_NAMELESS = "builtin.module(strip-debuginfo)"  #: names of operations take half of the bytes
_AXIS = re.compile(r'axis_ref<name = "([^"]+)"')
_VERSION = stablehlo.get_version_from_compatibility_requirement(
    stablehlo.StablehloCompatibilityRequirement.WEEK_12
)


def portable(one: export.Exported, ins: Sequence[P], outs: Sequence[P], mesh: dict[str, int]) -> Portable:
    """Return a program in the portable form; `ins` and `outs` say how its arguments and results lie on the mesh."""
    context = ir.Context()
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    with context, ir.Location.unknown():
        module = one.mlir_module(serialized=False)
        manual = [op for op in _operations(module.operation) if op.name == "sdy.manual_computation"]
        for op in manual:
            _hoist(module, op)
        _strip(module, mesh)
        passmanager.PassManager.parse(_NAMELESS).run(module.operation)
        names = {op.name for op in _operations(module.operation)} - {"builtin.module"}
        if others := sorted(name for name in names if not name.startswith(("stablehlo.", "func."))):
            raise UsageError(
                f"a program has {', '.join(others)}; need StableHLO alone, which can be read for years"
            )
        raw = stablehlo.serialize_portable_artifact(module, _VERSION)
    return Portable(
        stablehlo=_VERSION,
        sha256=sha256(raw),
        mesh=mesh,
        per_device=bool(manual),
        kept=tuple(one.module_kept_var_idx),
        ins=tuple(map(_array, one.in_avals, ins)),
        outs=tuple(map(_array, one.out_avals, outs)),
        module=raw,
    )


def _array(aval: Any, spec: P) -> Array:
    axes = tuple(() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec)
    return Array(str(aval.dtype), tuple(aval.shape), axes)


def _operations(op: Any) -> Iterator[Any]:
    yield op
    for region in op.regions:
        for block in region:
            for inner in list(block):
                yield from _operations(inner.operation)


def _hoist(module: ir.Module, manual: Any) -> None:
    """Put the body of a `shard_map` in its place, and give the function around it, and `main`, the types of one device.

    `main` calls this function once; the rest of both works on what is replicated, whose types do not change.
    """
    body, inside = manual.regions[0].blocks[0], manual.parent
    around, returned = inside.regions[0].blocks[0], body.operations[len(body.operations) - 1]
    types = [argument.type for argument in around.arguments]
    for outer, inner in zip(list(manual.operands), list(body.arguments), strict=True):
        if isinstance(outer.owner, ir.Block):
            types[ir.BlockArgument(outer).arg_number] = inner.type
        inner.replace_all_uses_with(outer)
    for argument, type_ in zip(around.arguments, types, strict=True):
        argument.set_type(type_)
    results = list(returned.operands)
    for op in list(body.operations)[:-1]:
        op.operation.move_before(manual)
    for outer, inner in zip(manual.results, results, strict=True):
        outer.replace_all_uses_with(inner)
    returned.operation.erase()
    manual.erase()
    made = _retyped(inside, around)
    main = ir.SymbolTable(module.operation)["main"].regions[0].blocks[0]
    name = ir.StringAttr(inside.attributes["sym_name"]).value
    if name == "main":
        return
    (call,) = (op for op in main.operations if op.operation.name == "func.call" and _callee(op) == name)
    for operand, type_ in zip(call.operands, types, strict=True):
        if isinstance(operand.owner, ir.Block):
            ir.BlockArgument(operand).set_type(type_)
    with ir.InsertionPoint(call):
        new = func.CallOp(made, ir.FlatSymbolRefAttr.get(name), list(call.operands))
    for old, result in zip(call.results, new.results, strict=True):
        old.replace_all_uses_with(result)
    call.operation.erase()
    _retyped(ir.SymbolTable(module.operation)["main"], main)


def _callee(call: Any) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _retyped(function: Any, block: Any) -> list[Any]:
    """Give a function the types of its block; return those of its results."""
    returned = block.operations[len(block.operations) - 1]
    ins, outs = ([x.type for x in some] for some in (block.arguments, returned.operands))
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(ins, outs))
    return outs


def _groups(axes: list[str], mesh: dict[str, int]) -> Any:
    """Return the devices that take part in a collective over axes of a mesh together: i64 [groups, devices]."""
    devices = np.arange(math.prod(mesh.values())).reshape(*mesh.values())
    own = [[*mesh].index(name) for name in axes]
    groups = np.moveaxis(devices, own, range(-len(own), 0)).reshape(
        -1, math.prod(mesh[name] for name in axes)
    )
    return np.ascontiguousarray(groups)


def _strip(module: ir.Module, mesh: dict[str, int]) -> None:
    """Remove what says where arrays lie, and attributes of JAX; call what a composite is made of."""
    for op in list(_operations(module.operation)):
        # JAX 0.12 names axes where 0.10 lists devices.
        groups = str(op.attributes["replica_groups"]) if "replica_groups" in op.attributes else ""
        if axes := _AXIS.findall(groups):
            op.attributes["replica_groups"] = ir.DenseElementsAttr.get(_groups(axes, mesh))
        if op.name == "sdy.sharding_constraint":
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        elif op.name == "stablehlo.composite":
            with ir.InsertionPoint(op):
                made = ir.FlatSymbolRefAttr(op.attributes["decomposition"])
                call = func.CallOp([x.type for x in op.results], made, list(op.operands))
            for old, new in zip(op.results, call.results, strict=True):
                old.replace_all_uses_with(new)
            op.erase()
    for op in list(module.body.operations):
        if op.operation.name == "sdy.mesh":
            op.operation.erase()
            continue
        for name in ("arg_attrs", "res_attrs"):
            if name in op.attributes:
                del op.attributes[name]
    for name in [one if isinstance(one, str) else one.name for one in module.operation.attributes]:
        if name.startswith(("mhlo.", "jax.")):
            del module.operation.attributes[name]
