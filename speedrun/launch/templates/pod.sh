set -euo pipefail
@@node

@@keep

# This shell is the first process of its container, so it passes signals on by itself.
code=0 signalled=
(node prepare; node train) &
work=$!
trap 'signalled=yes; kill -TERM "$work" 2>/dev/null || true' TERM INT
wait "$work" || code=$?
# A signal interrupts wait, so wait again.
while [[ $signalled ]]; do
  code=0 signalled=
  wait "$work" || code=$?
done
keep
exit "$code"
