"""All checks of a record, in the order they are shown. An id is never used again for another rule."""

from speedrun.ledger.checks import claims, clock, data, files
from speedrun.ledger.checks.table import Check

CHECKS: tuple[Check, ...] = (
    files.schema,
    files.chain,
    files.hashes,
    files.derived,
    files.config,
    files.known_track,
    files.one_story,
    files.plain_files,
    data.shard_hashes,
    data.shard_order,
    data.no_leak,
    data.token_count,
    data.val_tokens,
    data.shard_sizes,
    data.read_once,
    clock.monotonic,
    clock.clock_total,
    clock.wall_time,
    clock.pauses,
    clock.val_time,
    clock.no_compile,
    clock.warm_up,
    clock.untimed,
    clock.throughput,
    clock.outliers,
    claims.enough_runs,
    claims.possible,
    claims.stated,
    claims.hardware,
)
