#!/usr/bin/env bash
# Makes a record from a bare checkout on a node with eight GPUs: installs, checks the machine, fetches the data, trains a
# declared batch, and says what it proves. After an interruption the same command continues.
#
#   scripts/run_8gpu.sh [--dry-run] [OPTIONS OF speedrun batch]     for instance --recipe record89
#
# First prints time, disk space and cost. Log and environment: see scripts/run_track.sh.
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
exec "$(dirname "${BASH_SOURCE[0]}")/run_track.sh" main-8xh100 8 "$@"
