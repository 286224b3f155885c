name=@@name
stage=@@stage
out=@@out
data=@@data
checkout=@@checkout
image=@@image
hosts=(@@hosts)
run=(@@run)

record=@@record
@@{if_in_workdir}checkout=$PWD
@@join

# Sets up the environment of a node, then runs a function there.
node() {
  set -euo pipefail
  @@{if_image}export SPEEDRUN_IMAGE=$image
  @@{if_checkout}export PATH=$checkout/.venv/bin:$PATH
  @@{if_checkout}cd "$checkout"
  export SPEEDRUN_DATA=$stage/shards JAX_COMPILATION_CACHE_DIR=$stage/programs
  @@{if_gpus}export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_NVLS_ENABLE=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
  "$@"
}

# Checks a node and brings the shards to its own disk. Compiled programs are code, so the folder must be ours.
prepare() {
  (umask 077 && mkdir -p "$stage")
  if [[ ! -O $stage ]]; then
    echo "launch: $stage belongs to somebody else; pass another --stage" >&2
    return 2
  fi
  @@doctor
  @@shards
}

# Trains on a node. exec, so that a signal reaches the run.
train() {
  exec "${run[@]}" "$@" --out "$record"
}
