#!/usr/bin/env bash
# Like scripts/run_8gpu.sh, on one GPU: the same steps, each in eight microbatches.
#
#   scripts/run_1gpu.sh [--dry-run] [OPTIONS OF speedrun batch]     for instance --runs 4
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
exec "$(dirname "${BASH_SOURCE[0]}")/run_track.sh" single-gpu 1 "$@"
