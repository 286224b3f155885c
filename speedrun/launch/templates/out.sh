# The record can be written where it goes: checked before anything runs.
if ! mkdir -p "$out" || [[ ! -w $out ]]; then
  echo "launch: $out cannot be written; pass another --out" >&2
  exit 2
fi
