#!/usr/bin/env bash
# Runs speedrun in its container image, as you, with the data, records, runs and cache of this checkout.
#
#   scripts/docker_run.sh [--image NAME] [--alone] [--mount FROM:TO[:ro]]... [ARGUMENTS OF speedrun]
#
#   --image    default: speedrun:gpu where an NVIDIA driver answers, else speedrun:cpu;
#              make them with: docker build --target cpu --tag speedrun:cpu .
#   --alone    no network, and of this checkout only the history, read-only: for untrusted code
#   --mount    mounts another folder
#
# Environment: SPEEDRUN_DATA (data folder), SPEEDRUN_SHM (shared memory, default 16g), and the variables that a run
# records. No other variable is passed on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "${1:-}"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

variables=$(sed -n '/^VARIABLES = (/,/^)/s/^ *"\(.*\)",$/\1/p' "$root/speedrun/base/provenance.py")

has_gpus() {
  nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null 2>&1
}

# The digest with which the image can be pulled, or the local one if it was never published.
digest() {
  local found
  if ! found=$(docker image inspect --format '{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}' \
    -- "$1" 2>&1); then
    found=${found##*$'\n'}
    die "no image $1 (docker says: $found); make it: docker build --target ${1##*:} --tag $1 ."
  fi
  echo "$found"
}

main() {
  local image="" alone="" mounts=() options name named
  while (($#)); do
    case $1 in
      --image) image=${2:?--image needs a name} && shift 2 ;;
      --alone) alone=yes && shift ;;
      --mount) mounts+=(--volume "${2:?--mount needs FROM:TO}") && shift 2 ;;
      *) break ;;
    esac
  done
  command -v docker >/dev/null || die "there is no docker on the PATH; install Docker Engine"
  if [[ -z $image ]]; then if has_gpus; then image=speedrun:gpu; else image=speedrun:cpu; fi; fi
  named=$(digest "$image")

  # A health check would use the devices during a timed run.
  options=(--rm --init --no-healthcheck --user "$(id -u):$(id -g)" --cap-drop ALL --security-opt no-new-privileges
    --shm-size "${SPEEDRUN_SHM:-16g}" --ulimit memlock=-1 --ulimit stack=67108864
    --env "SPEEDRUN_IMAGE=$named")
  for name in $variables; do
    if [[ -n ${!name+set} ]]; then options+=(--env "$name"); fi
  done
  if has_gpus; then options+=(--gpus all); fi
  if [[ -t 0 && -t 1 ]]; then options+=(--interactive --tty); fi
  if [[ -n $alone ]]; then
    options+=(--network none)
  else
    share "${SPEEDRUN_DATA:-$root/data}" /workspace/data
    share "$root/records" /workspace/records
    share "$root/runs" /workspace/runs
    share "${XDG_CACHE_HOME:-$HOME/.cache}/speedrun-docker" /cache
  fi
  # The image does not know its commit: git compares its files with the history of this checkout. The config of git is
  # left out, as it may hold passwords.
  for name in HEAD index objects refs packed-refs; do
    if [[ -e $root/.git/$name ]]; then mounts+=(--volume "$root/.git/$name:/opt/speedrun/.git/$name:ro"); fi
  done
  exec docker run "${options[@]}" "${mounts[@]+"${mounts[@]}"}" -- "$image" "$@"
}

# Mounts a folder, made first so that it does not belong to root.
share() {
  mkdir -p "$1"
  mounts+=(--volume "$(cd "$1" && pwd):$2")
}

main "$@"
