#!/usr/bin/env bash
# Measures Baton's engine beside llama.cpp's llama-server in one run: same GGUF, one compute thread, one core; the client on
# another core. Both are built for this processor. Prints a table. Linux, at least two cores.
#
#   BATON    the binary to measure (default: target/dist/baton)
#   CLIENT   the benchmarks (default: target/dist/baton-bench)
#   ROUNDS   3; of each, every server is measured in turn
#   REQUESTS requests of a round (2); one at 4,000 tokens
set -euo pipefail
cd "$(dirname "$0")/.."
baton=${BATON:-$PWD/target/dist/baton}
client=${CLIENT:-$PWD/target/dist/baton-bench}
rounds=${ROUNDS:-3}
requests=${REQUESTS:-2}
. scripts/bench-servers.sh
needs_binary "$baton"
needs_binary "$client"
scripts/build-llama-server.sh
model=$("$baton" pull smollm2)

urls=() names=()
# Starts a server and waits for it: serve NAME COMMAND…, in which PORT is its port.
serve() {
  local name=$1 port; shift
  port=$(free_port)
  start "$name" "${@//PORT/$port}"
  answers "$name" "http://127.0.0.1:$port/health"
  names+=("$name")
  urls+=(--url "$name=http://127.0.0.1:$port")
}
# Room for eight conversations of 4,400 tokens in all of them.
serve baton "$baton" serve --model "$model" --listen 127.0.0.1:PORT --slots 8 --threads 1 --kv-cells 36864
serve llama-server "$PWD/target/upstreams/build/bin/llama-server" --model "$model" --host 127.0.0.1 \
  --port PORT --parallel 8 --kv-unified --ctx-size 36864 --threads 1 --threads-batch 1

alike=("${urls[@]}" --rounds "$rounds" --warm-up 0 --ignore-eos --timeout 600)
load short "${alike[@]}" --concurrency 1 --requests "$requests" --input-words 10 --output-tokens 128
load deep "${alike[@]}" --concurrency 1 --requests "$requests" --input-words 880 --output-tokens 128
load deepest "${alike[@]}" --concurrency 1 --requests 1 --input-words 3050 --output-tokens 128
load eight "${alike[@]}" --concurrency 8 --requests $((8 * requests)) --input-words 20 --output-tokens 64

# Four clients leave in the middle of their prompts; a fifth one asks for a token.
echo "bench-llama-server: four leave" >&2
prompt() { python3 -c 'import random, sys; print(" ".join(f"word{random.randrange(10**6)}" for _ in range(int(sys.argv[1]))))' "$1"; }
ask=(curl -sS -o "$work/answer" -H 'content-type: application/json' --max-time 300 -d @-)
body() {
  printf '{"model":"%s","stream":%s,"max_tokens":1,"messages":[{"role":"user","content":"%s"}]}' "$name" "$2" "$(prompt "$1")"
}
for round in $(seq $((rounds + 2))); do
  for i in "${!names[@]}"; do
    api=${urls[2 * i + 1]#*=}/v1
    url=$api/chat/completions
    name=$(curl -fsS "$api/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
    clients=()
    for client in 1 2 3 4; do
      body 400 true >"$work/long"
      "${ask[@]/answer/answer-$client}" "$url" <"$work/long" &
      clients+=($!)
      sleep 0.1
    done
    sleep 1
    kill "${clients[@]}"
    wait "${clients[@]}" 2>/dev/null || true
    body 4 false | "${ask[@]}" -w '%{time_total}\n' "$url" >>"$work/left-${names[$i]}"
  done
done

python3 - "$work" "${names[@]}" <<'PY'
import json, statistics, sys
work, names = sys.argv[1], sys.argv[2:]

def figures(load, server, of):
    servers = {s["name"]: s for s in json.load(open(f"{work}/{load}.json"))["servers"]}
    return [of(r) for r in servers[server]["rounds"]]

def p50(round, kind):
    return round["latencies"][kind]["percentiles_ms"][1]

rows = []
for load, words in [("short", "short prompts"), ("deep", "about 1,160 tokens"), ("deepest", "about 4,000 tokens")]:
    if load != "short":
        rows.append((f"prefill of {words}, tok/s", load, lambda r: r["mean_prompt_tokens"] / p50(r, "ttft") * 1e3))
    rows.append((f"decode behind {words}, tok/s", load, lambda r: 1e3 / p50(r, "tpot")))
rows.append(("eight streams, tok/s", "eight", lambda r: r["n_tokens"] / r["seconds"]))
print("\n| | " + " | ".join(names) + " | Baton ÷ llama-server |\n|---" + "|---" * (len(names) + 1) + "|")
for name, load, of in rows:
    values = [figures(load, server, of) for server in names]
    # A ratio for each round, in which the servers were measured side by side.
    ratio = statistics.median(a / b for a, b in zip(*values))
    cells = [f"{statistics.median(v):,.1f}" for v in values]
    print(f"| {name} | " + " | ".join(cells) + f" | {ratio:.2f} |")
left = [sorted(float(x) for x in open(f"{work}/left-{name}")) for name in names]
cells = [f"{statistics.median(x):.2f} ({x[-1]:.2f})" for x in left]
print("| next reply after four clients left, s (worst) | " + " | ".join(cells) + " | |")
PY
echo
echo "$(machine); one compute thread, $rounds rounds of $requests requests"
