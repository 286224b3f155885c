"""Types of settings with limits, such as `num_heads: Count`."""

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, lt=2**31)]
Natural = Annotated[int, Meta(ge=0, lt=2**31)]
Steps = Annotated[int, Meta(ge=1, le=1_000_000)]  #: all are planned before the first
Positive = Annotated[float, Meta(ge=1e-37, le=1e38)]  #: in float32
Rate = Annotated[float, Meta(ge=0, le=1e38)]  #: of learning, of decay
Blocks = Annotated[float, Meta(ge=0, le=1e7)]  #: of a window: its tokens are counted in 32 bits
Momentum = Annotated[float, Meta(ge=0, lt=1)]  #: of a running mean, also of squares
Fraction = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Size = Annotated[int, Meta(ge=0, lt=2**49)]  #: of a file or memory in bytes, or of data in tokens
Sha256 = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]  #: in hex digits; empty if unknown
StateHash = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]


def check(node: Any) -> None:
    """Raise ValueError for a value in nested dataclasses that its type does not permit."""
    for field in fields(node) if is_dataclass(node) and not isinstance(node, type) else ():
        value = getattr(node, field.name)
        if _is_plain(hint := field.type):
            try:
                msgspec.convert(value, hint)
            except (msgspec.ValidationError, TypeError) as error:
                need = f"need {hint}" if "enum" in str(error) else str(error).replace("Expected", "need")
                raise ValueError(f"{field.name} is {value!r}; {need.replace('typing.', '')}") from None
        for part in value if isinstance(value, tuple) else (value,):
            check(part)


def _is_plain(hint: Any) -> bool:
    """Return whether msgspec can check a type. For a class, it would evaluate annotations that are strings."""
    if any(hint is plain for plain in (bool, int, float, str, NoneType, ...)) or get_origin(hint) is Literal:
        return True
    parts = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return get_origin(hint) in (Annotated, tuple, Union, UnionType) and all(map(_is_plain, parts))
