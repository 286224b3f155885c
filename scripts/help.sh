# shellcheck shell=bash
# Prints the head of the script that sources it, and ends that script, if one of the arguments is -h or --help. Also has
# what ends a script with an error, and sees to HOME.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/help.sh" "$@"
if [[ -z ${HOME:-} ]]; then unset HOME && export HOME=~; fi # some jobs have none
for word; do
  if [[ $word == -h || $word == --help ]]; then
    while IFS= read -r line && [[ $line == '#'* ]]; do
      line=${line#\#}
      if [[ $line != '!'* ]]; then echo "${line# }"; fi
    done <"$0"
    exit
  fi
done

die() {
  echo "$(basename "$0" .sh): $*" >&2
  exit "${died:-2}"
}
