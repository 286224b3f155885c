#!/usr/bin/env bash
# Updates requirements/*.lock from pyproject.toml. For maintainers; needs uv ($UV, or on the PATH).
#
#   scripts/lock.sh              keeps every pin that still fits
#   scripts/lock.sh --upgrade    takes the newest version of everything
#
# The locks are universal: one file for Linux, macOS, x86-64 and arm64, for Python 3.11 (with the last JAX that supports
# it) and newer versions (with the newest JAX). They name no index: pip uses the one that you configured.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# lock FILE TITLE [UV ARGUMENTS]: writes one file of pins and digests.
lock() {
  local file=requirements/$1 what=$2 pins
  shift 2
  pins=$(mktemp)
  # uv keeps the pins in its output file.
  if [[ -f $file ]]; then cp "$file" "$pins"; fi
  "${UV:-uv}" pip compile --quiet --universal --python-version "${python:-3.11}" --generate-hashes \
    --no-header --no-emit-index-url --no-annotate --output-file "$pins" "$@" >/dev/null
  { echo "# $what Made by scripts/lock.sh; not by hand."; cat "$pins"; } >"$file"
  rm "$pins"
}

# The largest lock first: its pins constrain the others, so that all agree.
lock dev.lock "Everything that scripts/test.sh needs." pyproject.toml --group build --extra dev "$@"
for extra in cuda12 cuda13; do
  lock $extra.lock "What scripts/quickstart.sh needs on a machine with an NVIDIA GPU." \
    pyproject.toml --group build --extra $extra --constraint requirements/dev.lock "$@"
done
# A few wheels of cuda12.lock, enough to compile. uv has no option for an extra without its package.
aot=$(python3 -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["aot"], sep="\n")')
lock aot.lock "The compiler for GPUs that are not there; laid over dev.lock." --no-deps \
  --constraint requirements/cuda12.lock - "$@" <<<"$aot"
lock run.lock "What scripts/quickstart.sh needs." \
  pyproject.toml --group build --constraint requirements/dev.lock "$@"
lock prep.lock "What making shards of text needs, too: speedrun data prep." \
  pyproject.toml --group build --extra prep --constraint requirements/dev.lock "$@"
lock islands.lock "What islands need, too: speedrun islands." \
  pyproject.toml --group build --extra islands --constraint requirements/dev.lock "$@"
lock site.lock "What scripts/site.sh needs." --group build --group site --constraint requirements/dev.lock "$@"

# Another JAX and its compiler, installed over the others: SPEEDRUN_JAX=0.11.2 scripts/test.sh.
overlay=0.11.2
python=3.12 lock jax-$overlay.lock "The JAX that GPU images carry; laid over the other locks." --no-deps \
  - "$@" <<<"jax==$overlay"$'\n'"jaxlib==$overlay"
python=3.12 lock aot-$overlay.lock "The compiler for GPUs that are not there, for jax-$overlay.lock." --no-deps \
  - "$@" < <(sed "/^jax/s/>=[^;]*/==$overlay/" <<<"$aot")
