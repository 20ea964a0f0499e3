#!/usr/bin/env bash
# What evaluators read, by hand: lm-eval's multiple choice and perplexity with `local-completions` and the server's tokenizer,
# and the perplexity of a text beside that of llama.cpp's own tool.
#
#   scripts/check-lm-eval.sh MODEL.gguf [options of `baton serve`]
#   TEXT    the text (default: LICENSE)
#   N_CTX   tokens of a window (512)
#
# lm-eval's tasks are small and in scripts/lm-eval/, since this downloads no data sets. Needs target/release/baton, Python and
# what builds llama.cpp.
set -euo pipefail
cd "$(dirname "$0")/.."
file=$1; shift
text=${TEXT:-LICENSE}
n_ctx=${N_CTX:-512}
env=target/lm-eval
[ -x "$env/bin/lm_eval" ] || { python3 -m venv "$env"; "$env/bin/pip" install --quiet "lm-eval[api]==0.4.13"; }
scripts/build-llama-server.sh perplexity

log=$(mktemp)
target/release/baton serve --model "$file" "$@" --listen 127.0.0.1:0 >"$log" 2>&1 &
baton=$!
trap 'kill $baton; rm -f "$log"' EXIT
for _ in $(seq 600); do
  url=$(grep -om1 'http://127.0.0.1:[0-9]*' "$log" || true)
  [ -n "$url" ] && curl -fs "$url/health" >/dev/null && break
  kill -0 $baton || { cat "$log"; exit 1; }
  sleep 0.5
done
model=$(curl -fs "$url/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 "$env/bin/lm_eval" run --model local-completions --include_path scripts/lm-eval \
  --tasks capitals,prose --model_args "model=$model,base_url=$url/v1/completions,tokenizer_backend=remote,num_concurrent=2"

echo "perplexity of $text in windows of $n_ctx tokens, Baton: $(python3 scripts/lm-eval/perplexity.py "$url" "$model" "$text" "$n_ctx")"
kill $baton && wait $baton || true
trap 'rm -f "$log"' EXIT
target/upstreams/build/bin/llama-perplexity -m "$file" -f "$text" -c "$n_ctx" -b "$n_ctx" -fa on 2>&1 | grep -E 'Final estimate|n_ctx=' |
  sed 's/^/llama-perplexity: /'
