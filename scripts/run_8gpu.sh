#!/usr/bin/env bash
# From a bare checkout on a node with eight GPUs to a validated record: installs, looks at the machine, fetches the
# data, trains once. Start it again after any interruption: what is done is not done twice, except the run itself.
#
#   scripts/run_8gpu.sh [ARGUMENTS OF speedrun run]     for instance --seed 1
#
# Everything it says is also in runs/main-8xh100.log. Environment: as in scripts/install.sh, and $SPEEDRUN_DATA for the
# folder that data lies in.
exec "$(dirname "${BASH_SOURCE[0]}")/run_track.sh" main-8xh100 8 "$@"
