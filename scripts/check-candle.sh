#!/usr/bin/env bash
# The candle build compiles without a C++ compiler and serves SmolLM2 to the README's curl. Then the engine's tests run, beside
# llama.cpp, and the demonstration hands KV over in both directions. For `make candle`.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/without-cpp.sh
source scripts/without-cpp.sh
timed=scripts/timed.sh
BATON_TEST_MODEL=$(target/release/baton pull smollm2)
BATON_TEST_SWA_MODEL=$(target/release/baton pull gemma3-270m)
export BATON_TEST_MODEL BATON_TEST_SWA_MODEL
# candle and mlx-lm hand over, too.
BATON_CACHE=$PWD/target/mlx-cache $timed "mlx-lm's installation" target/release/baton mlx install > target/mlx-python.txt
read -r BATON_TEST_MLX_PYTHON < target/mlx-python.txt
export BATON_TEST_MLX_PYTHON BATON_TEST_MLX_MODEL=$BATON_TEST_MODEL BATON_TEST_MLX_SWA_MODEL=$BATON_TEST_SWA_MODEL

began=$SECONDS
build_without_cpp candle --features candle
echo "step: candle build, $((SECONDS - began)) s"
"$hide/candle" serve --model "$BATON_TEST_MODEL" --name smollm2 --listen 127.0.0.1:0 > "$hide/out" 2>&1 &
server=$!
wait_for_address 60
curl -fsSN --max-time 60 "$base/v1/chat/completions" -d '{
  "model": "smollm2", "stream": true, "max_tokens": 16,
  "messages": [{"role": "user", "content": "Why is the sky blue?"}]}' > "$hide/reply"
grep -q '"content"' "$hide/reply" && grep -q 'data: \[DONE\]' "$hide/reply" \
  || { cat "$hide/reply" >&2; echo "the candle build does not answer" >&2; exit 1; }
kill "$server"
wait "$server" || true
server=
echo "candle build: compiled without C++, served SmolLM2"

${CARGO:-cargo} build --release --locked --features candle
$timed "candle tests" ${CARGO:-cargo} test --release --locked --workspace --features baton/candle --test engines -- candle --test-threads=1 --nocapture
for direction in "candle llama" "llama candle"; do
  # shellcheck disable=SC2086  # two words
  set -- $direction
  $timed "demo, $1 to $2" target/release/baton demo --from "$1" --to "$2" --words 200
done
# The binary without candle again, so that nothing mistakes this one for it.
${CARGO:-cargo} build --release --locked
