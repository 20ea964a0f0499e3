#!/usr/bin/env bash
# The mlx engine: `baton mlx install` into an empty folder, its tests beside llama.cpp, and the demonstration, which hands KV over
# in both directions. For `make mlx`.
set -euo pipefail
cd "$(dirname "$0")/.."
timed=scripts/timed.sh
BATON_TEST_MODEL=$(target/release/baton pull smollm2)
export BATON_TEST_MODEL
export BATON_TEST_MLX_MODEL=$BATON_TEST_MODEL
BATON_TEST_MLX_SWA_MODEL=$(target/release/baton pull gemma3-270m)
export BATON_TEST_MLX_SWA_MODEL

# A cache of its own, so that the installation is always tested; pip keeps what it has downloaded.
BATON_CACHE=$PWD/target/mlx-cache
export BATON_CACHE
mkdir -p "$BATON_CACHE"
[ -e "$BATON_CACHE/$(basename "$BATON_TEST_MODEL")" ] || ln "$BATON_TEST_MODEL" "$BATON_CACHE/" 2>/dev/null || cp "$BATON_TEST_MODEL" "$BATON_CACHE/"
rm -rf "$BATON_CACHE/mlx"
$timed "mlx-lm's installation" target/release/baton mlx install > "$BATON_CACHE/python.txt"
read -r BATON_TEST_MLX_PYTHON < "$BATON_CACHE/python.txt"
export BATON_TEST_MLX_PYTHON

$timed "mlx tests" ${CARGO:-cargo} test --release --locked --workspace --test engines -- mlx --test-threads=1 --nocapture
for direction in "mlx llama" "llama mlx"; do
  # shellcheck disable=SC2086  # two words
  set -- $direction
  $timed "demo, $1 to $2" target/release/baton demo --from "$1" --to "$2" --words 100
done
