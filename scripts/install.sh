#!/usr/bin/env bash
# Makes .venv from the lock files. Called by quickstart.sh and test.sh; may be called by hand, as often as you like.
#
#   scripts/install.sh [run|prep|islands|dev|compile]
#
#   run      what `speedrun` needs
#   prep     also what makes shards from text: datasets, pyarrow, tiktoken, and the fast tokenizer
#   islands  what a run needs, and Ray
#   dev      also the tools of scripts/test.sh
#   compile  also the compiler for absent GPUs (Linux), and Ray
#
# Environment, all optional:
#   PYTHON                 the interpreter to use (3.11 or newer)
#   SPEEDRUN_ACCELERATOR   cpu, cuda12 or cuda13; default: what was named before, else by the NVIDIA driver
#   SPEEDRUN_JAX           another JAX with a lock here, such as 0.11.2
#
# Nothing is installed outside .venv. Every package is pinned by digest. pip uses the index that you configured, but no
# constraint and no other place. Python 3.11 gets the last JAX that supports it, newer ones the newest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export died=1 # a machine that lacks something is no wrong argument

# Prints the first Python that is new enough and can make environments.
find_python() {
  local name tried="" candidates=(python3 python3.14 python3.13 python3.12 python3.11 python)
  # An existing environment keeps its Python. Without pyvenv.cfg, as an interrupted install leaves it, it names no other.
  if [[ -x .venv/bin/python && -f .venv/pyvenv.cfg ]]; then candidates=(.venv/bin/python "${candidates[@]}"); fi
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  for name in "${candidates[@]}"; do
    "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
      # Not the one in .venv, which may be removed, but the one that made it.
      "$name" -c 'import sys; print(sys._base_executable)'
      return
    fi
    tried+=" $name"
  done
  [[ -z $tried ]] || die "found$tried, but without the venv module; install it (Debian, Ubuntu: apt install python3-venv)"
  die "found no Python 3.11 or newer as ${candidates[*]}; install one, or name it: PYTHON=/path/to/python3.12 $0"
}

# cuda13 needs driver 580; older drivers run CUDA 12.
accelerator() {
  local driver
  if [[ -n ${SPEEDRUN_ACCELERATOR:-} ]]; then
    echo "$SPEEDRUN_ACCELERATOR"
  elif [[ -f $chosen ]]; then
    cat "$chosen"
  elif driver=$(timeout 90 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) && [[ -n $driver ]]; then
    if ((${driver%%.*} >= 580)); then echo cuda13; else echo cuda12; fi
  else
    # It hangs where a GPU is lost.
    (($? != 124)) || die "nvidia-smi gave no answer in 90 s; mend the driver, or set SPEEDRUN_ACCELERATOR"
    echo cpu
  fi
}

# One digest of everything that decides what is installed.
digest() {
  "$1" -c 'import hashlib, sys
from pathlib import Path
print(hashlib.sha256(b"\0".join([sys.version.encode(), *(Path(p).read_bytes() for p in sys.argv[1:])])).hexdigest())' \
    "${@:2}"
}

# Refuses disks that are too full. GB of wheels and of unpacked files, for `run`, measured on the locks of November 2026.
# pip keeps the wheels in its cache, and in TMPDIR until all are unpacked.
need_room() {
  local kind=$1 fetch=0.2 unpacked=0.8 cache place folder full
  if [[ $kind == cuda12 ]]; then fetch=3.4 unpacked=6.0; fi
  if [[ $kind == cuda13 ]]; then fetch=2.7 unpacked=4.8; fi
  cache=${PIP_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/pip}
  full=$(for place in "$unpacked $PWD" "$fetch ${TMPDIR:-/tmp}" "$fetch $cache"; do
    folder=${place#* }
    until [[ -d $folder ]]; do folder=$(dirname "$folder"); done
    echo "${place%% *} $(df -Pk "$folder" | awk 'NR == 2 { print $4, $1 }') $folder"
  done | awk -v kind="$kind" '
    { need[$3] += $1; free[$3] = $2 / 1e6; folders[$3] = folders[$3] " " $4 }
    END { for (disk in need) if (free[disk] < need[disk])
      printf "found %.1f GB free for%s, %s needs %.1f; ", free[disk], folders[disk], kind, need[disk] }')
  [[ -z $full ]] || die "${full}free some, or name another disk: TMPDIR, PIP_CACHE_DIR, or that of the checkout"
  echo "install: at least $fetch GB to fetch, $unpacked GB of disk"
}

main() {
  # Two installs into one checkout would delete each other's files. macOS has no flock.
  if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock -n 9 || { echo "install: another install runs here; waiting for it to end" && flock 9; }
  fi
  local want=${1:-run} kind lock locks overlay=() python pip stamp=.venv/speedrun.stamp chosen=.venv/speedrun.accelerator sum name
  kind=$(accelerator)
  case $want in
    run) locks=(requirements/run.lock) ;;
    prep | islands) locks=("requirements/$want.lock") ;;
    dev) locks=(requirements/dev.lock) ;;
    compile) locks=(requirements/dev.lock requirements/islands.lock) ;;
    *) die "got $want; need run, prep, islands, dev or compile" ;;
  esac
  # The CUDA locks already contain a compiler, of the same version as JAX.
  if [[ $want == compile && $kind == cpu ]]; then locks+=("requirements/aot${SPEEDRUN_JAX:+-$SPEEDRUN_JAX}.lock"); fi
  if [[ $kind != cpu ]]; then locks+=("requirements/$kind.lock"); fi
  if [[ -n ${SPEEDRUN_JAX:-} ]]; then
    [[ $kind == cpu ]] || die "SPEEDRUN_JAX has no lock for $kind; need SPEEDRUN_ACCELERATOR=cpu"
    overlay=("requirements/jax-$SPEEDRUN_JAX.lock")
  fi
  for lock in "${locks[@]}" "${overlay[@]+"${overlay[@]}"}"; do
    [[ -f $lock ]] || die "there is no $lock; choose one of: $(echo requirements/*.lock)"
  done

  # An environment with more packages also has those of less.
  python=$(find_python)
  sum="$kind ${SPEEDRUN_JAX:-} $(digest "$python" pyproject.toml requirements/*.lock)"
  if [[ -n ${SPEEDRUN_ACCELERATOR:-} && -f $stamp ]]; then echo "$kind" >"$chosen"; fi
  if [[ -x .venv/bin/speedrun && -f $stamp ]]; then
    case "$want $(<"$stamp")" in
      "$want $want $sum" | *" compile $sum" | "run prep $sum" | "run islands $sum" | "run dev $sum" | "prep dev $sum") return ;;
    esac
  fi

  [[ ! -e .venv || -f $stamp ]] || die ".venv exists and was not made by this script; move it away"
  echo "install: $("$python" --version), $kind, ${locks[*]}${overlay[*]+ ${overlay[*]}} -> .venv"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
    echo "install: this Python gets an older JAX than 3.12, which the images have: times and losses of the two differ"
  for name in PIP_CONSTRAINT PIP_USER PIP_TARGET PIP_PREFIX; do
    if [[ -n ${!name:-} ]]; then echo "install: leaves out $name=${!name}, with which pip would not fill .venv"; fi
    export "$name=" # also against a pip.conf
  done
  need_room "$kind"
  mkdir -p .venv
  echo "unfinished" >"$stamp"
  if [[ -n ${SPEEDRUN_ACCELERATOR:-} ]]; then echo "$kind" >"$chosen"; fi
  # Remove the packages of an earlier environment.
  find .venv/ -mindepth 1 -not -path "$stamp" -not -path "$chosen" -delete
  "$python" -m venv .venv
  # Most of 9,000 files are never imported: compiling them all would take 17 s.
  pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile)
  # The locks are complete, which `pip check` confirms: pip need not work out what each package depends on.
  "${pip[@]}" --no-deps --require-hashes "${locks[@]/#/--requirement=}"
  if ((${#overlay[@]})); then "${pip[@]}" --no-deps --require-hashes "${overlay[@]/#/--requirement=}"; fi
  "${pip[@]}" --no-deps --no-build-isolation --editable .
  .venv/bin/python -m pip --disable-pip-version-check check --quiet
  echo "$want $sum" >"$stamp"
}

main "$@"
