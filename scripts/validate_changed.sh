#!/usr/bin/env bash
# Validates the records that a branch adds or changes, with the validator of this checkout. For CI; needs bash 4.4.
#
#   scripts/validate_changed.sh CHECKOUT BASE
#
# CHECKOUT is a clone with the branch at its HEAD, BASE the commit it is compared with. Nothing of it is run, imported
# or installed: git lists its changes, `speedrun validate` reads its files. Ends with 1 if a record is refused.
set -euo pipefail
export LC_ALL=C PYTHONUTF8=1 # a name may be any bytes
checkout=${1:?need a checkout} base=${2:?need a commit}
exec 2>&1

# A record's words must not be commands to the machine that shows them: none counts until a number it cannot know.
if [[ -n ${GITHUB_ACTIONS:-} ]]; then
  marker=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  echo "::stop-commands::$marker"
  trap 'echo; echo "::$marker::"' EXIT
fi

# What lies in records/<track>/ is a record; a file there is none, and a link leads elsewhere.
declare -A seen=()
records=() status=0
while IFS= read -rd '' path; do
  if [[ -L $checkout/$path ]]; then
    printf 'refused: %q is a link\n' "$path"
    status=1
  fi
  if ! [[ $path =~ ^records/[^/]+/[^/]+ ]]; then continue; fi
  record=${BASH_REMATCH[0]}
  if [[ -n ${seen[$record]:-} ]]; then continue; fi
  seen[$record]=1
  if [[ -d $checkout/$record ]]; then
    records+=("$checkout/$record")
  elif [[ -e $checkout/$record ]]; then
    printf 'refused: %q is no folder of a record\n' "$record"
    status=1
  else
    printf 'removed: %q\n' "$record"
  fi
done < <(git -C "$checkout" diff --no-ext-diff --no-renames --name-only -z "$base" HEAD -- records)
wait $! # no commit to compare with is no reason to pass

echo "${#records[@]} records added or changed"
if ((${#records[@]})); then speedrun validate --strict -- "${records[@]}" || status=1; fi
exit $status
