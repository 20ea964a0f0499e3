#!/usr/bin/env bash
# Cross-compiles for aarch64 Linux, runs the result under qemu-user, and hands KV between it and this machine's own binary,
# which `make build` has made. For x86-64 Debian. scripts/arm/ shows how; everything stays under target/arm.
set -euo pipefail
cd "$(dirname "$0")/.."
timed=scripts/timed.sh
inside=scripts/arm/inside.sh
began=$SECONDS

[ "$(uname -m)" = x86_64 ] || { echo "arm: this is for x86-64 machines; on an Arm machine run make test" >&2; exit 1; }
$timed "a newer Debian" scripts/arm/root.sh

model=$(target/release/baton pull smollm2)
export MODELS BATON_CLUSTER_KEY
MODELS=$(dirname "$model")
arm_model=/models/$(basename "$model")
BATON_CLUSTER_KEY=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
$inside cargo fetch --locked --target aarch64-unknown-linux-gnu

# One call, because Cargo enables other features of crates for tests.
$timed "build for aarch64" $inside cargo build --release --locked --workspace --bin baton --test engines
arm=target/arm/build/aarch64-unknown-linux-gnu/release/baton
$timed "packages for aarch64" $inside scripts/arm/packages.sh "$arm" target/arm/packages

# Under the emulator a token of a real model takes about 50 times as long, so these tests use the simulator and tiny models.
$timed "contract of engines, handoffs, hostile peers and the node protocol" \
  $inside cargo test --release --locked --workspace --test engines -- --test-threads=2 --nocapture \
  contract:: kv_architectures:: handoff:: hostile_peer:: streams:: load_stream:: node_tls:: template_goldens:: --skip ubatches_larger

# A prefill node on a free port; sets `url`. It ends with this script.
nodes=()
trap '[ ${#nodes[@]} = 0 ] || kill "${nodes[@]}" 2>/dev/null || true' EXIT
prefill_node() { # LOG MODEL BATON...
  local log=$1 model=$2
  shift 2
  "$@" node --model "$model" --listen 127.0.0.1:0 --role prefill --threads 1 > "$log" 2>&1 &
  nodes+=($!)
  for _ in $(seq 600); do
    url=$(sed -n 's/^baton node is ready on /http:\/\//p' "$log")
    [ -z "$url" ] || return 0
    kill -0 "$!" || { cat "$log" >&2; return 1; }
    sleep 0.2
  done
  return 1
}
sizes=(--devices cpu --tokens 16 --new-tokens 8 --threads 1)
prefill_node target/arm/x86-node.log "$model" target/release/baton
echo "x86-64 prefills, aarch64 decodes:"
$timed "handoff to aarch64" $inside "$arm" doctor --model "$arm_model" "${sizes[@]}" --prefill "$url"
prefill_node target/arm/arm-node.log "$arm_model" $inside "$arm"
echo "aarch64 prefills, x86-64 decodes:"
$timed "handoff from aarch64" target/release/baton doctor --model "$model" "${sizes[@]}" --prefill "$url"

$timed "thin build for aarch64" $inside scripts/check-thin-build.sh
echo "step: everything took $((SECONDS - began)) s"
