"""All checks of a record, by id. An id is never used again for another rule."""

from speedrun.ledger.checks import batches, claims, environment, files, source, timing, tokens
from speedrun.ledger.checks.table import Check

_MODULES = (batches, claims, environment, files, source, timing, tokens)

_FOUND = [one for module in _MODULES for one in vars(module).values() if isinstance(one, Check)]

CHECKS: tuple[Check, ...] = tuple(sorted(_FOUND, key=lambda one: one.id))
