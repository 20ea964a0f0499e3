#!/usr/bin/env bash
# Measures Baton's engine beside llama.cpp's llama-server in one run: same GGUF, one compute thread, one core; the client on
# another core. Both are built for this processor. Prints a table. Linux, at least two cores.
#
#   BATON    the binary to measure (default: target/dist/baton)
#   CLIENT   the benchmarks (default: target/dist/baton-bench)
#   ROUNDS   3; of each, every server is measured in turn
#   REQUESTS requests of a round (2); one at 4,000 tokens
#   LOADS    short deep deepest eight left burst, or fewer
#   BURST_REQUESTS, BURST_SLOTS, BURST_ROUNDS  requests that arrive at once (64), slots of each server (16), rounds (as ROUNDS)
#   RESULTS_PAGE  a page that gets the table, with the report beside it; RESULTS_JSON a file for the report alone
set -euo pipefail
cd "$(dirname "$0")/.."
baton=${BATON:-$PWD/target/dist/baton}
client=${CLIENT:-$PWD/target/dist/baton-bench}
rounds=${ROUNDS:-3}
requests=${REQUESTS:-2}
loads=" ${LOADS:-short deep deepest eight left burst} "
burst=${BURST_REQUESTS:-64}
burst_slots=${BURST_SLOTS:-16}
wants() { [[ $loads == *" $1 "* ]]; }
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
# Starts both with so many slots that share so many cells: serve_both SLOTS CELLS. Those of an earlier call end.
serve_both() {
  [ ${#started[@]} -eq 0 ] || { kill "${started[@]}" 2>/dev/null || true; wait 2>/dev/null || true; }
  started=() urls=() names=()
  # The last of a burst wait longer than clients usually do.
  echo 'max_wait_seconds = 3600' >"$work/baton.toml"
  serve baton "$baton" serve --config "$work/baton.toml" --model "$model" --listen 127.0.0.1:PORT --slots "$1" --threads 1 --kv-cells "$2"
  serve llama-server "$PWD/target/upstreams/build/bin/llama-server" --model "$model" --host 127.0.0.1 \
    --port PORT --parallel "$1" --kv-unified --ctx-size "$2" --threads 1 --threads-batch 1
}

# Many at once, of 50 to 2,000 tokens, most of them short: those that find no slot wait in the server's own queue.
if wants burst; then
  serve_both "$burst_slots" $((2304 * burst_slots))
  load burst "${urls[@]}" --rounds "${BURST_ROUNDS:-$rounds}" --warm-up 0 --ignore-eos --timeout 3600 --concurrency "$burst" \
    --requests "$burst" --input-words 20-1500 --output-tokens 64
fi

# Room for eight conversations of 4,400 tokens in all of them.
serve_both 8 36864
alike=("${urls[@]}" --rounds "$rounds" --warm-up 0 --ignore-eos --timeout 600)
if wants short; then load short "${alike[@]}" --concurrency 1 --requests "$requests" --input-words 10 --output-tokens 128; fi
if wants deep; then load deep "${alike[@]}" --concurrency 1 --requests "$requests" --input-words 880 --output-tokens 128; fi
if wants deepest; then load deepest "${alike[@]}" --concurrency 1 --requests 1 --input-words 3050 --output-tokens 128; fi
if wants eight; then
  load eight "${alike[@]}" --concurrency 8 --requests $((8 * requests)) --input-words 20 --output-tokens 64
fi

# Four clients leave in the middle of their prompts; a fifth one asks for a token.
prompt() { python3 -c 'import random, sys; print(" ".join(f"word{random.randrange(10**6)}" for _ in range(int(sys.argv[1]))))' "$1"; }
ask=(curl -sS -o "$work/answer" -H 'content-type: application/json' --max-time 300 -d @-)
body() {
  printf '{"model":"%s","stream":%s,"max_tokens":1,"messages":[{"role":"user","content":"%s"}]}' "$name" "$2" "$(prompt "$1")"
}
n_left=0
if wants left; then n_left=$((rounds + 2)) && echo "bench-llama-server: four leave" >&2; fi
for round in $(seq "$n_left"); do
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

llama_server=$(sed -n 's/^# .* all of llama.cpp at \([0-9a-f]*\),.*/\1/p' tests/clients/llama_cpp/source.txt)
python3 - "$work" "llama-server=$llama_server" "${names[@]}" <<'PY'
import statistics
import sys
from pathlib import Path

sys.path.insert(0, "scripts")
from bench_results import Loads, Results, shown

work, names = Path(sys.argv[1]), sys.argv[3:]
loads = Loads(work)
results = Results("llama", "Beside llama-server", loads.any, [sys.argv[2]])
results.head(*names, "Baton ÷ llama-server")


def row(name, load, of, digits, unit, better):
    """A row of both servers if the load was run. The ratio is of each round, in which they were measured side by side."""
    if load not in loads:
        return
    values = {server: [of(figures) for figures in loads.rounds(load, server)] for server in names}
    for server, rounds in values.items():
        results.figure(f"{server}: {name}", unit, better, rounds)
    ratios = [a / b for a, b in zip(*values.values())]
    results.figure(f"Baton ÷ llama-server: {name}", "times", better, ratios)
    results.row(name, *(shown(values[server], digits) for server in names), f"{statistics.median(ratios):.2f}")


tokens = lambda figures: figures["n_tokens"] / figures["seconds"]
for load, words in [("short", "short prompts"), ("deep", "about 1,160 tokens"), ("deepest", "about 4,000 tokens")]:
    if load in loads:
        p50 = loads.percentile(load, "p50")
        if load != "short":
            prefill = lambda r: r["mean_prompt_tokens"] / p50(r, "ttft") * 1e3
            row(f"prefill of {words}, tok/s", load, prefill, 1, "tokens_per_second", "more")
        row(f"decode behind {words}, tok/s", load, lambda r: 1e3 / p50(r, "tpot"), 1, "tokens_per_second", "more")
row("eight streams, tok/s", "eight", tokens, 1, "tokens_per_second", "more")
if "burst" in loads:
    n = loads.runs["burst"]["settings"]["pace"]["closed"]["concurrency"]
    for name in ("p50", "p95"):
        of = loads.percentile("burst", name)
        row(f"{n} requests at once: TTFT {name}, s", "burst", lambda r: of(r, "ttft") / 1e3, 2, "seconds", "less")
    row(f"{n} requests at once: tok/s", "burst", tokens, 1, "tokens_per_second", "more")
    row(f"{n} requests at once: until all are answered, s", "burst", lambda r: r["seconds"], 1, "seconds", "less")
if (work / f"left-{names[0]}").exists():
    left = {name: [float(x) for x in (work / f"left-{name}").read_text().split()] for name in names}
    for name, seconds in left.items():
        results.figure(f"{name}: next reply after four clients left", "seconds", "less", seconds)
    results.row("next reply after four clients left, s (worst)",
                *(f"{shown(left[name], 2)} ({max(left[name]):.2f})" for name in names), "")
results.publish("llama")
PY
echo "one compute thread, $rounds rounds of $requests requests"
