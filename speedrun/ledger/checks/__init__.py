"""All checks of a record, by id. An id is never used again for another rule."""

from speedrun.ledger.checks import batches, claims, environment, files, source, timing, tokens
from speedrun.ledger.checks.table import Check

_MODULES = (batches, claims, environment, files, source, timing, tokens)

CHECKS: tuple[Check, ...] = tuple(
    sorted(
        (one for module in _MODULES for one in vars(module).values() if isinstance(one, Check)),
        key=lambda one: one.id,
    )
)
