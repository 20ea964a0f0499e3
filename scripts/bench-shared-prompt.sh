#!/usr/bin/env bash
# Compares Baton and llama.cpp's llama-server, fresh and after chats with one system prompt (scripts/shared-prompt.py). Builds
# llama-server first.
#
#   BATON   the binary (default: target/release/baton)
#   MODEL   a GGUF (default: SmolLM2, which is fetched)
#   ARCHITECTURE  of a tiny model with random weights instead, such as Qwen35, a hybrid
#   CHATS   numbers of chats (default: 8 32)
#   SHARED  numbers of shared tokens (default: 64 1000 6000)
set -euo pipefail
cd "$(dirname "$0")/.."
baton=${BATON:-$PWD/target/release/baton}
. scripts/bench-servers.sh
needs_binary "$baton"
scripts/build-llama-server.sh
if [ -n "${ARCHITECTURE:-}" ]; then
  model=$work/$ARCHITECTURE.gguf
  cargo build --quiet --release --locked --workspace --features baton-tiny-gguf/llama --bin random-gguf
  target/release/random-gguf "$ARCHITECTURE" "$model"
else
  model=${MODEL:-$("$baton" pull smollm2)}
fi
for shared in ${SHARED:-64 1000 6000}; do
  for chats in ${CHATS:-8 32}; do
    ours=$(free_port)
    start baton "$baton" serve --model "$model" --listen "127.0.0.1:$ours" --slots 4 --ctx-size 8192 --kv-cells 32768
    answers baton "http://127.0.0.1:$ours/health"
    theirs=$(free_port)
    start llama-server target/upstreams/build/bin/llama-server --model "$model" --host 127.0.0.1 --port "$theirs" \
      --parallel 4 --ctx-size 32768
    answers llama-server "http://127.0.0.1:$theirs/health"
    scripts/shared-prompt.py "$chats" "$shared" "baton=http://127.0.0.1:$ours" "llama-server=http://127.0.0.1:$theirs"
    kill "${started[@]}"
    wait 2>/dev/null || true
    started=()
  done
done
