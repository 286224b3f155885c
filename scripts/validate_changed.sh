#!/usr/bin/env bash
# Validates the records that a branch adds or changes, with the validator of this checkout, and compares the board with
# all of them. For CI; needs bash 4.4.
#
#   scripts/validate_changed.sh CHECKOUT BASE
#
# CHECKOUT is a clone with the branch at its HEAD, BASE the commit to compare with. Nothing in it is run, imported or
# installed: git lists the changes, `speedrun validate` reads the files. Exits with 1 if a record is refused or
# removed, or the board is another.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
export LC_ALL=C PYTHONUTF8=1 # file names may be any bytes
checkout=${1:?need a checkout} base=${2:?need a commit}
exec 2>&1

# Text of a record must not act as a workflow command: commands are off until an unpredictable marker.
if [[ -n ${GITHUB_ACTIONS:-} ]]; then
  marker=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  echo "::stop-commands::$marker"
  trap 'echo; echo "::$marker::"' EXIT
fi

# A record is a folder in records/<track>/, neither a file nor a link.
records=() status=0
while IFS= read -rd '' place; do
  at=$checkout/$place why=""
  if [[ -L $at ]]; then
    why="is a link"
  elif [[ $place != records/*/* ]]; then
    printf 'not a record: %q, for a maintainer to read\n' "$place"
  elif [[ -d $at ]]; then
    records+=("$at")
  elif [[ -e $at ]]; then
    why="is no folder of a record"
  else
    why="is removed; only a maintainer removes records"
  fi
  if [[ -n $why ]]; then printf 'refused: %q %s\n' "$place" "$why" && status=1; fi
done < <(git -C "$checkout" diff --no-ext-diff --no-renames --name-only -z "$base" HEAD -- records | cut -zd/ -f1-3 | sort -zu)
wait $! # fails if BASE is no commit

echo "${#records[@]} records added or changed"
if ((${#records[@]})); then speedrun validate --strict -- "${records[@]}" || status=1; fi
speedrun leaderboard check --records "$checkout/records" || status=1
exit $status
