#!/usr/bin/env bash
# Streams one answer with curl; python3 only quotes the question. Usage: examples/chat.sh "Why is the sky blue?"
set -euo pipefail
base=${BATON_URL:-http://127.0.0.1:8080/v1}
model=${BATON_MODEL:-smollm2}
# Encode the question as a JSON string, whatever it contains.
question=$(printf '%s' "${1:-Why is the sky blue?}" | python3 -c 'import json, sys; print(json.dumps(sys.stdin.read()))')
curl -fsSN "$base/chat/completions" \
  -d "{\"model\": \"$model\", \"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": $question}]}"
