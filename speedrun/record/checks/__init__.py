"""All checks of a record, by id. An id is never used again: V004, V203, V211, V212, V502 and V504 are retired."""

from speedrun.record.checks import (
    v0_files,
    v1_islands,
    v1_tokens,
    v2_timing,
    v3_batches,
    v3_claims,
    v4_environment,
    v5_source,
)
from speedrun.record.checks.table import Check

_MODULES = (v3_batches, v3_claims, v4_environment, v0_files, v5_source, v2_timing, v1_tokens, v1_islands)

_FOUND = [one for module in _MODULES for one in vars(module).values() if isinstance(one, Check)]

CHECKS: tuple[Check, ...] = tuple(sorted(_FOUND, key=lambda one: one.id))
