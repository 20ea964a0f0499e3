#!/usr/bin/env bash
# Measures how KV with the shapes of Qwen3.6-27B comes back from memory and disk: 65,536 bytes a token and states of 157 MB, as the real
# model's, behind random weights of few parameters. Some minutes on two cores, 8 GiB of memory and 4 GB of disk.
#
#   BENCH  the program (default: target/release/baton-bench), with a `baton` beside it
#   Further arguments go to `baton-bench kv-store`: --rounds 3, --disk DIR, --json FILE.
set -euo pipefail
cd "$(dirname "$0")/.."
bench=${BENCH:-$PWD/target/release/baton-bench}
[ -x "$bench" ] || { echo "bench-kv-store-27b: there is no $bench: run \`make bench-program-dist\`" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo build --quiet --release --locked --workspace --features baton-tiny-gguf/llama --bin random-gguf
target/release/random-gguf Qwen36Of27B "$work/qwen36-27b-shapes.gguf"
"$bench" kv-store --models "$work/qwen36-27b-shapes.gguf" --lengths 500,2000 --rounds 2 --threads 2 "$@"
