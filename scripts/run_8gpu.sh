#!/usr/bin/env bash
# Makes a record ready to submit, from a bare checkout on a node with eight GPUs: installs, checks the machine, fetches
# the data, trains a batch, tests, validates and packs it. After an interruption the same command continues.
#
#   scripts/run_8gpu.sh [ARGUMENTS OF speedrun attempt]     for instance --dry-run, or --runs 6
#
# First prints time, disk space and cost. Log and environment: see scripts/run_track.sh.
# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
exec "$(dirname "${BASH_SOURCE[0]}")/run_track.sh" main-8xh100 8 "$@"
