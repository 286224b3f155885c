#!/usr/bin/env bash
# From a bare checkout on a node with eight GPUs to a record that is ready to be sent: installs, looks at the machine,
# fetches the data, trains a batch, tests it, validates it, packs it. Start it again after any interruption: it goes on.
#
#   scripts/run_8gpu.sh [ARGUMENTS OF speedrun attempt]     for instance --dry-run, or --runs 6
#
# Says beforehand what it takes in minutes, gigabytes and money. Log, environment: see scripts/run_track.sh.
exec "$(dirname "${BASH_SOURCE[0]}")/run_track.sh" main-8xh100 8 "$@"
