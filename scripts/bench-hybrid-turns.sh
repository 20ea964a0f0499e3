#!/usr/bin/env bash
# Counts the tokens that Baton and llama.cpp's llama-server, each with one slot, compute for an agent's conversation of 40 turns
# on tiny models with states, and on one without. Builds llama-server first.
#
#   BATON  the binary (default: target/release/baton)
set -euo pipefail
cd "$(dirname "$0")/.."
baton=${BATON:-$PWD/target/release/baton}
. scripts/bench-servers.sh
needs_binary "$baton"
scripts/build-llama-server.sh
cargo build --quiet --release --locked --workspace --features baton-tiny-gguf/llama --bin random-gguf
for architecture in ${ARCHITECTURES:-Qwen3Moe Qwen35Moe NemotronH Lfm2 Mamba2}; do
  model=$work/$architecture.gguf
  target/release/random-gguf "$architecture" "$model"
  ours=$(free_port)
  start baton "$baton" serve --model "$model" --listen "127.0.0.1:$ours" --slots 1 --threads 1 --ctx-size 16384
  answers baton "http://127.0.0.1:$ours/health"
  theirs=$(free_port)
  start llama-server target/upstreams/build/bin/llama-server --model "$model" --host 127.0.0.1 --port "$theirs" \
    --parallel 1 --ctx-size 16384 --threads 1 --threads-batch 1
  answers llama-server "http://127.0.0.1:$theirs/health"
  echo "## $architecture"
  scripts/agent-turns.py "baton=http://127.0.0.1:$ours" "llama-server=http://127.0.0.1:$theirs"
done
