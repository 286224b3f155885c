#!/usr/bin/env bash
# Measures everything that needs a GPU, in slices: commands of `speedrun`, one after the other, each with a limit of
# time. The GPU machine needs no network: missing packages are brought along.
#
#   scripts/measure_gpu.sh --wheels DIR                  with a network: fetches missing packages, less than 1 MiB
#   scripts/measure_gpu.sh [--from DIR] [OPTIONS]        on the GPU machine: installs them into .gpu/packages, measures
#
#   --rehearse            the same parts tiny on a CPU, in a few minutes
#   --out DIR             default ./measured: NAME.json is what a part printed, NAME.err what it said, summary.txt one
#                         line for each. A part that has ended does not run again; the end of a slice is no end of a part
#   --minutes N           time limit of this slice; the same command continues with what is missing
#   --parts NAME,...      only these, also again; a wrong name lists them all
#   --shards DIR          3 million real tokens (*_train_*.bin) and 131,073 to score (*_val_*.bin), in llm.c's format;
#                         default: synthetic ids with the document lengths of FineWeb
#   --baseline DIR        another program, DIR/run, timed in turns with ours: see speedrun/machine/bench_step.py
#   --baseline89 DIR      likewise, for record 89
#
# Environment, all optional:
#   SPEEDRUN_PYTHON       the Python with JAX for CUDA; default python3. Nothing is installed into it
#
# Parts stand in the order of what their answer is worth. `--minutes 8` says whether record 92 trains, alone and with one
# GPU's whole share of its table, where its and record 89's times go against the prediction, and record 89's ratio to PyTorch.
#
# Compiled programs stay in .gpu for the next try. Exits with 1 if a part gave no figures, with 2 if JAX cannot use the GPU.
# Whether the kernels are right is a test: SPEEDRUN_TEST_PLATFORM=gpu pytest tests/science/test_gpu.py
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${SPEEDRUN_PYTHON:-python3}

# Fetches what Python 3.12 with JAX for CUDA 13 lacks on Linux x86-64, by the digests of the lock file.
fetch() {
  "$python" -m pip download --quiet --no-deps --require-hashes --only-binary=:all: --python-version=3.12 \
    --implementation=cp --platform=manylinux_2_28_x86_64 --platform=manylinux2014_x86_64 --dest "$1" \
    --requirement <(sed -n '/^\(flatbuffers\|msgspec\)==/,/[^\\]$/p' requirements/run.lock)
}

# Calls a function with name, limit in seconds and words of each part, most important first. w1, w7 and w14 are windows of
# attention, by a step of the schedule that has them.
each() {
  local step=(--recipe record21 --devices 1) one=(--microbatches 1 --set stages.0.num_sequences=1) steps=60
  local heads=(--tokens 49152 --heads 6 --dim 128) head=(--tokens 49152 --dim 768) text form w blocks change
  local record92=(--recipe record92 --devices 1 --microbatches 1 --first-step 802) columns=24576 i
  local small=(--set config.ngram_rows=65536) whole=(--set config.ngram_rows=10575360) tries=18 fifty=50
  local record89=(--recipe record89 --devices 1 --microbatches 1 --first-step 1001) turn=10
  for i in 0 1 2 3 4; do record92+=(--set "stages.$i.num_sequences=1"); done
  for i in 0 1 2 3; do record89+=(--set "stages.$i.num_sequences=1"); done
  local -A first=([w1]=0 [w7]=787 [w14]=1769)
  text=("${step[@]}" "${one[@]}" --set eval_seq_len=16384)
  if [[ -n $rehearse ]]; then
    step=(--recipe smoke --devices 1 --set stages.0.seq_len=64) steps=6
    heads=(--tokens 512 --heads 2 --dim 16) head=(--tokens 64 --dim 32 --vocab 512)
    first=([w1]=0 [w7]=100 [w14]=279)
    text=(--recipe webmini --devices 1 "${one[@]}" --set config.model_dim=32 --set config.num_heads=2
      --set config.head_dim=16 --set config.mlp_dim=64)
    record92=(--recipe record92 --devices 1 --first-step 80 --set size=smoke) whole=() columns=200 tries=3 fifty=5
    record89=(--recipe record89 --devices 1 --first-step 80 --set size=smoke) turn=2
  fi
  # Record 92 on one batch: a part ends at the first number that is not finite, and names it. Then its kinds, and record 89's.
  "$1" anvil 150 bench step "${record92[@]}" "${small[@]}" --steps $tries
  "$1" anvil-table 200 bench step "${record92[@]}" ${whole[@]+"${whole[@]}"} --steps $fifty
  "$1" profile-92 150 profile "${record92[@]}" "${small[@]}" --steps 2 --top 40 --out "$out/profile-92"
  "$1" profile-89 150 profile "${record89[@]}" --steps 2 --top 40 --out "$out/profile-89"
  if [[ -n $baseline89 ]]; then
    "$1" baseline-89 300 bench baseline "$baseline89" "${record89[@]}" --steps $turn --data "$shards"
  fi
  for form in triton banded; do for w in w1 w7 w14; do
    "$1" "step-$form-$w" 300 bench step "${step[@]}" --steps 5 --attention $form --first-step "${first[$w]}"
  done; done
  for w in w1 w14; do # one sequence, the share of one of eight GPUs
    "$1" "rank-triton-$w" 300 bench step "${step[@]}" "${one[@]}" --steps 5 --attention triton --first-step "${first[$w]}"
  done
  "$1" run 300 run --track webmini "${text[@]}" --set stages.0.num_steps=$steps --data "$shards" --out "$out/run"
  if [[ -n $baseline ]]; then "$1" baseline 450 bench baseline "$baseline" "${text[@]}" --steps $steps --data "$shards"; fi
  for w in w1 w14; do
    "$1" "profile-$w" 300 profile "${step[@]}" "${one[@]}" --first-step "${first[$w]}" --steps 2 --top 40 \
      --out "$out/profile-$w"
  done
  # If record 92 does not train: one change at a time.
  local anvil=(bench step "${record92[@]}" "${small[@]}" --steps "$tries")
  "$1" anvil-polar 300 "${anvil[@]}" --set optimizer.polar_dtype=float32
  for change in mlp_gradient_scale=0 mlp_dtype=bfloat16 qkv_dtype=bfloat16; do
    "$1" "anvil-${change%=*}" 300 "${anvil[@]}" --set "config.$change"
  done
  "$1" anvil-banded 300 "${anvil[@]}" --attention banded
  "$1" anvil-columns 300 "${anvil[@]}" --set "schedule.phases.2.columns=($columns,)"
  "$1" doctor 120 doctor
  "$1" head 120 bench head "${head[@]}"
  for blocks in 1 2 4 7 10 14; do
    "$1" attention-w$blocks 120 bench attention "${heads[@]}" --block 128 --window $blocks
  done
  "$1" plan 120 plan --recipe record21 --devices 1
}

name_it() { names+=("$1"); }

# measure NAME LIMIT WORDS...: runs a part unless it has ended, and adds its line to the summary.
measure() {
  local name=$1 at=$out/$1 left=$((60 * minutes - SECONDS)) limit=$2 code=0 said
  if [[ -n $wanted ]]; then [[ $wanted == *",$name,"* ]] || return 0; else [[ ! -e $at.json ]] || return 0; fi
  if ((left <= 0)); then late+=" $name" && return; fi
  rm -rf "$at" # what an earlier try made
  timeout --signal=KILL $((left < limit ? left : limit)) "$python" -m speedrun "${@:3}" --json \
    >"$at.part" 2>"$at.err" </dev/null &
  child=$!
  wait $child || code=$?
  if ((code == 137 && left < limit)); then late+=" $name" && return; fi # by the end of the slice
  mv "$at.part" "$at.json"
  said=$("$python" - "$at.json" 2>/dev/null <<'END'
import json, sys
found = json.load(open(sys.argv[1]))
found = found if isinstance(found, dict) else {"timings": found}
keys = "error", "mean_ms", "step_ms", "mfu", "peak_bytes", "ratio"
facts = [(key, found[key]) for key in keys if found.get(key) is not None]
facts = [(key, one["mean"] if isinstance(one, dict) else one) for key, one in facts] # of an interval
facts += [(one["name"], one["median_ms"]) for one in found.get("timings", ())]
print(*(f"{key} {value if isinstance(value, str) else format(value, '.5g')}" for key, value in facts), sep=", ")
END
  ) || { said="no figures; it said last: $(tail -n 1 "$at.err")" && code=$((code > 1 ? code : 3)); }
  case $code in 0 | 1) code=ok ;; 2) code=refused ;; 137) code=killed ;; *) code=failed ;; esac
  printf '%-8s %-34s %s\n' $code "$name" "$said" | tee -a "$out/summary.txt"
  if [[ $code == failed || $code == killed ]]; then bad+=" $name"; fi
}

main() {
  wheels="" rehearse="" out=measured minutes=30 wanted="" shards="" baseline="" baseline89="" names=() late="" bad=""
  child=""
  while (($#)); do
    case $1 in
      --rehearse) rehearse=yes && shift && continue ;;
      --wheels | --from | --out | --minutes | --parts | --shards | --baseline | --baseline89) (($# > 1)) || die "$1 needs a value" ;;
      *) die "got $1; --help says what there is" ;;
    esac
    case $1 in
      --wheels) fetch "$2" && exit ;;
      --from) wheels=$2 ;;
      --parts) wanted=,$2, ;;
      *) printf -v "${1#--}" %s "$2" ;;
    esac
    shift 2
  done
  each name_it
  for one in ${wanted//,/ }; do
    [[ " ${names[*]} " == *" $one "* ]] || die "no part $one; have: ${names[*]}"
  done
  [[ -z $wheels ]] ||
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target .gpu/packages "$wheels"/*.whl
  export PYTHONPATH="$PWD:$PWD/.gpu/packages${PYTHONPATH:+:$PYTHONPATH}" JAX_PLATFORMS=cuda # not also cpu: no fallback
  export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.gpu/programs}"
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0}"
  if [[ -n $rehearse ]]; then JAX_PLATFORMS=cpu; fi
  missing=$("$python" -c 'import click, flatbuffers, jax, msgspec, optax' 2>&1) ||
    die "$python lacks a package (${missing##*$'\n'}); need --from DIR with the wheels of --wheels"
  missing=$(timeout --signal=KILL 120 "$python" -c 'import jax; jax.devices()' 2>&1) ||
    die "JAX cannot use this GPU (${missing##*$'\n'})" # all parts would fail
  mkdir -p "$out"
  if [[ -z $shards ]]; then
    shards=.gpu/tokens
    [[ -d $shards ]] || "$python" -c 'from pathlib import Path
from speedrun.data import synthetic
from speedrun.base import track
synthetic.write_imitation(Path(".gpu/tokens"), track.load("webmini").data, 6_000_000)'
  fi
  trap 'kill $child; exit 130' INT TERM
  each measure
  if [[ -n $late ]]; then echo "time is up before$late; the same command continues there"; fi
  if [[ -n $bad ]]; then echo "measure_gpu: no figures of$bad" >&2 && exit 1; fi
}

main "$@"
