#!/usr/bin/env bash
# Like scripts/run_8gpu.sh, on one GPU: the same steps, each in eight microbatches.
#
#   scripts/run_1gpu.sh [ARGUMENTS OF speedrun attempt]     for instance --dry-run, or --runs 4
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
exec "$(dirname "${BASH_SOURCE[0]}")/run_track.sh" single-gpu 1 "$@"
