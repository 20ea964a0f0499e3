#!/usr/bin/env bash
# lm-eval's multiple choice and perplexity against Baton, by hand: its `local-completions` with the server's tokenizer.
# The tasks are small and in scripts/lm-eval/, since this downloads no data sets. Needs target/release/baton and Python.
set -euo pipefail
cd "$(dirname "$0")/.."
env=target/lm-eval
[ -x "$env/bin/lm_eval" ] || { python3 -m venv "$env"; "$env/bin/pip" install --quiet "lm-eval[api]==0.4.13"; }

log=$(mktemp)
target/release/baton serve "$@" --listen 127.0.0.1:0 >"$log" 2>&1 &
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
