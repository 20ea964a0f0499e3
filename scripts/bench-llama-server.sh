#!/usr/bin/env bash
# Measures Baton's engine beside llama.cpp's llama-server in one run: same GGUF, one compute thread, one core; the client on
# another core. llama-server is built twice: with the processor's own instructions, as by default, and portable, as the
# engine in Baton is. Prints a table. Linux, at least two cores.
#
#   BATON    the binary to measure (default: target/dist/baton)
#   CLIENT   the binary that runs `bench serve` (default: the same)
#   ROUNDS   3; of each, every server is measured in turn
#   REQUESTS requests of a round (2); one at 4,000 tokens
set -euo pipefail
cd "$(dirname "$0")/.."
baton=${BATON:-$PWD/target/dist/baton}
client=${CLIENT:-$baton}
rounds=${ROUNDS:-3}
requests=${REQUESTS:-2}
server_core=${SERVER_CORE:-1}
client_core=${CLIENT_CORE:-0}
[ -x "$baton" ] || { echo "bench-llama-server: there is no $baton: run \`make dist\`" >&2; exit 1; }
scripts/build-llama-server.sh portable
model=$("$baton" pull smollm2)

work=$(mktemp -d)
started=()
stop() {
  local status=$?
  [ ${#started[@]} -eq 0 ] || kill "${started[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  [ $status -eq 0 ] || tail -n 5 "$work"/*.log >&2 || true
  rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM

urls=() names=()
# Starts a server on its core: start NAME COMMAND…, in which PORT is its port.
start() {
  local name=$1 port; shift
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  taskset -c "$server_core" "${@//PORT/$port}" >"$work/$name.log" 2>&1 &
  started+=($!)
  for _ in $(seq 300); do
    if curl -fsS -o "$work/answer" --max-time 5 "http://127.0.0.1:$port/health" 2>/dev/null; then
      names+=("$name")
      urls+=(--url "$name=http://127.0.0.1:$port")
      return 0
    fi
    sleep 0.2
  done
  echo "bench-llama-server: $name does not answer" >&2
  exit 1
}
# Room for eight conversations of 4,400 tokens in all of them.
start baton "$baton" serve --model "$model" --listen 127.0.0.1:PORT --slots 8 --threads 1 --kv-cells 36864
for build in portable native; do
  folder=$build
  [ "$build" = portable ] || folder=build
  start "llama-server-$build" "$PWD/target/upstreams/$folder/bin/llama-server" --model "$model" --host 127.0.0.1 \
    --port PORT --parallel 8 --kv-unified --ctx-size 36864 --threads 1 --threads-batch 1
done

# Runs a load: load NAME OPTIONS…
load() {
  local name=$1; shift
  echo "bench-llama-server: $name" >&2
  taskset -c "$client_core" "$client" bench serve "${urls[@]}" --rounds "$rounds" --warm-up 0 --ignore-eos --timeout 600 \
    --json "$work/$name.json" "$@" >"$work/$name.txt" || { cat "$work/$name.txt" >&2; exit 1; }
}
load short --concurrency 1 --requests "$requests" --input-words 10 --output-tokens 128
load deep --concurrency 1 --requests "$requests" --input-words 880 --output-tokens 128
load deepest --concurrency 1 --requests 1 --input-words 3050 --output-tokens 128
load eight --concurrency 8 --requests $((8 * requests)) --input-words 20 --output-tokens 64

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
print("\n| | " + " | ".join(names) + " | Baton ÷ portable, native |\n|---" + "|---" * (len(names) + 1) + "|")
for name, load, of in rows:
    values = [figures(load, server, of) for server in names]
    # A ratio for each round, in which the servers were measured side by side.
    ratios = [statistics.median(a / b for a, b in zip(values[0], other)) for other in values[1:]]
    cells = [f"{statistics.median(v):,.1f}" for v in values]
    print(f"| {name} | " + " | ".join(cells) + " | " + ", ".join(f"{r:.2f}" for r in ratios) + " |")
left = [sorted(float(x) for x in open(f"{work}/left-{name}")) for name in names]
cells = [f"{statistics.median(x):.2f} ({x[-1]:.2f})" for x in left]
print("| next reply after four clients left, s (worst) | " + " | ".join(cells) + " | |")
PY
echo
echo "$(date -I), $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), one compute thread, $rounds rounds of $requests requests"
