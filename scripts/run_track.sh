#!/usr/bin/env bash
# Makes a record from a bare checkout. scripts/run_8gpu.sh is this for main-8xh100.
#
#   scripts/run_track.sh TRACK GPUS [--dry-run] [OPTIONS OF speedrun batch]     for instance single-gpu 1 --recipe record89
#
# Installs, says what the batch takes and how likely it proves its target, checks the machine, gets the shards, runs a
# declared batch, and says what it proves and what to type next. After an interruption the same command goes on. By
# default `--runs` is the number that proves the target 9 of 10 times, and `--out` is runs/TRACK; another batch needs
# another `--out`. `--dry-run` prints the steps, runs, time, disk space and cost; it needs no GPU, installs nothing and
# writes nothing.
#
# Environment, all optional:
#
#   SPEEDRUN_DOLLARS   price of one GPU for an hour; default 2.50
#   SPEEDRUN_DATA      folder for data; default ./data
#   SPEEDRUN_PYTHON    a Python with all packages; default: scripts/install.sh makes .venv
#
# All output is also in runs/TRACK.log. Exits as the step that failed; with 1 if the batch does not prove its target.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# step NAME COMMAND: prints it, runs it unless in a dry run, and exits if it fails. A batch that proves nothing ends with 1.
step() {
  echo "== $(date -u +%FT%TZ) $1:$(printf ' %q' "${@:2}")"
  if [[ -n $dry ]]; then return; fi
  set -m # in a process group of its own: a Ctrl-C must not reach it twice
  "${@:2}" </dev/null &
  child=$!
  set +m
  # A signal ends `wait`, and not yet the child.
  while code=0 && { wait "$child" || code=$?; } && kill -0 "$child" 2>/dev/null; do :; done
  if ((stopped)); then code=$stopped; fi
  [[ $code == 0 || ($code == 1 && $1 == batch) ]] ||
    died=$code die "$1 ended with exit code $code; to go on, mend what it says and type the command again"
}

main() {
  [[ ${2:-} =~ ^[0-9]+$ ]] || die "got '$*'; need a track and a number of GPUs before options, such as single-gpu 1"
  track=$1 gpus=$2 rules=speedrun/tracks/$1.toml
  shift 2
  [[ -f $rules ]] || die "there is no $rules; have: $(echo speedrun/tracks/*.toml)"
  record=runs/$track dry="" data="" title="" group="" said="" stopped=0 declared=(--track "$track") kept=() extra=()
  while (($#)); do
    if [[ $1 == --dry-run ]]; then dry=yes && shift && continue; fi
    if [[ $1 == --unranked ]]; then declared+=("$1") && shift && continue; fi
    if [[ $1 == --*=* ]]; then set -- "${1%%=*}" "${1#*=}" "${@:2}"; fi
    (($# > 1)) || die "got $1 without a value; need --dry-run or options of 'speedrun batch' that say what to run"
    case $1 in
      --out) record=$2 ;;
      --title) title=$2 ;;
      --recipe) declared+=("$1" "$2") extra=("$1" "$2") ;;
      --data) data=$2 kept+=("$1" "$2") ;;
      --ghost | --wandb) kept+=("$1" "$2") ;;
      --track | --resume | --json | --on | --dollars | --device-kind | [!-]*)
        die "got $1; need --dry-run or options of 'speedrun batch' that say what to run" ;;
      *) declared+=("$1" "$2") ;;
    esac
    shift 2
  done
  declared+=(--out "$record")
  batch=("${declared[@]}" ${kept[@]+"${kept[@]}"} ${title:+--title "$title"})
  typed=$(printf '%q ' "${batch[@]}")
  if [[ -f $record/batch.json ]]; then
    begun=$(grep . "$record.typed" 2>/dev/null) || begun="options that are not known (speedrun batch --resume goes on)"
    [[ $begun == "$typed" ]] ||
      die "$record was begun with $begun; pass the same to go on, or another --out to begin another"
    batch=(--resume "$record" ${kept[@]+"${kept[@]}"})
    if [[ ! -f $record/about.json ]]; then batch+=(${title:+--title "$title"}); fi # `describe` may have set another
  fi
  read -ra get <<<"$(sed -n 's/^get = "\(.*\)"$/\1/p' "$rules")"
  if [[ ${get[2]:-} == get ]]; then get+=(${extra[@]+"${extra[@]}"}); fi # with the vocabulary, if the recipe needs it
  if [[ -n $data ]]; then get=(speedrun data verify --track "$track" --data "$data"); fi
  [[ ${get[0]} == speedrun ]] || die "track $track takes anybody's shards; ${get[*]}"

  names=$(timeout 90 nvidia-smi --query-gpu=name --format=csv,noheader 2>&1) || said=" (nvidia-smi: ${names:-no answer})" names=""
  if [[ -z $dry ]]; then
    found=$(grep -c . <<<"$names") || true
    ((found >= gpus)) || die "found $found GPUs${said//$'\n'/ }, $track needs $gpus; choose another script, or a machine with more"
    mkdir -p runs "$(dirname "$record")"
    { exec 8>>"$record.typed"; } 2>/dev/null || die "cannot write $record.typed; pass --out $record/first"
    # Locked until all that this script started has ended; macOS has no flock.
    [[ -z $(type -P flock) ]] || flock -n 8 || die "another run_track.sh works on $record; wait, or pass another --out"
    # A signal to the process group must not end the log before the run.
    exec > >(trap '' INT TERM HUP && exec tee -a "runs/$track.log") 2>&1
    trap 'stopped=$((stopped ? 130 : 75))
      group=$(jobs -p) # it may run before its number is known here
      if [[ -n $group ]]; then kill -TERM -- "-$group" || true; else exit $stopped; fi' INT TERM HUP
  fi

  # NVIDIA recommends the first for JAX on such nodes; records name both.
  if ((gpus > 0)); then
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}"
  fi

  python=${SPEEDRUN_PYTHON:-.venv/bin/python}
  [[ $python == .venv/* ]] || "$python" -c 'import click, msgspec' 2>/dev/null || died=1 die "SPEEDRUN_PYTHON=$python lacks packages; unset it"
  if [[ -z ${SPEEDRUN_PYTHON:-} ]]; then step install scripts/install.sh run; fi
  if [[ -n $dry && -z ${SPEEDRUN_PYTHON:-} && ! -x .venv/bin/speedrun ]]; then
    echo "time, disk space and cost need the packages: type this again after scripts/install.sh run"
  elif [[ ${batch[0]} != --resume ]]; then
    of='import sys; from speedrun.base.accelerators import DEVICES
print(*(kind for kind, device in DEVICES.items() if device.name == sys.argv[1]))'
    if [[ -n $names ]]; then kind=$("$python" -c "$of" "${names%%$'\n'*}"); fi
    if [[ -n $names && -z $kind ]]; then echo "run_track: no rates of ${names%%$'\n'*} known; the plan is another GPU's"; fi
    dry="" step plan "$python" -m speedrun batch "${batch[@]}" --dry-run --dollars "${SPEEDRUN_DOLLARS:-2.50}" \
      ${kind:+--device-kind "$kind"}
  fi
  step doctor "$python" -m speedrun doctor --track "$track"
  step data "$python" -m "${get[@]}"
  if [[ -z $dry && ${batch[0]} != --resume ]]; then printf '%s\n' "$typed" >"$record.typed"; fi
  step batch "$python" -m speedrun batch "${batch[@]}"
  if [[ -n $dry ]]; then exit; fi

  "$python" -m speedrun stats "$record" || true # the batch has the exit code
  if ((code)); then
    echo "run_track: a run crashed, a check failed, or the target is not proven: see above"
    echo "next: the same command, if runs are missing; else $python -m speedrun submit --missed $record"
  else
    echo "next: $python -m speedrun validate --strict $record"
    echo "then: $python -m speedrun submit $record"
  fi
  exit "$code"
}

main "$@"
