#!/usr/bin/env bash
# Measures Baton in front of an upstream beside nginx, vllm-router and sglang-router in one run, and Baton in front of its
# own simulated engine; prints a table. Linux, at least two cores: the servers are pinned to one,
# the client and the mock upstreams to another.
#
#   BATONS   the binaries to measure, NAME=PATH … (default: baton=target/dist/baton)
#   CLIENT   the benchmarks (default: target/dist/baton-bench)
#   ROUNDS, SECONDS_A_ROUND   3 and 6
#   JSON_TOKENS   tokens of a JSON reply (8)
#   PEERS    nginx vllm-router sglang-router, or fewer
#   RESULTS_PAGE  a page that gets the table, with the report beside it; RESULTS_JSON a file for the report alone
set -euo pipefail
cd "$(dirname "$0")/.."
read -r -a batons <<<"${BATONS:-baton=$PWD/target/dist/baton}"
client=${CLIENT:-$PWD/target/dist/baton-bench}
rounds=${ROUNDS:-3}
seconds=${SECONDS_A_ROUND:-6}
read -r -a peers <<<"${PEERS-nginx vllm-router sglang-router}"
built=$PWD/target/peers
. scripts/bench-servers.sh
. scripts/router-packages.sh
for binary in "${batons[@]#*=}" "$client"; do needs_binary "$binary"; done
ulimit -n "$(ulimit -Hn)"
# 256 clients, their connections, and as many to the upstream.
[ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge 4096 ] || { echo "bench-peers: needs 4,096 open files" >&2; exit 1; }
mkdir -p "$built"

# Sets up the peers once.
has() { printf '%s\n' "${peers[@]:-}" | grep -qx "$1"; }
if has nginx && [ ! -x "$built/nginx/usr/sbin/nginx" ]; then
  if command -v nginx >/dev/null; then
    mkdir -p "$built/nginx/usr/sbin" && ln -sf "$(command -v nginx)" "$built/nginx/usr/sbin/nginx"
  else
    echo "bench-peers: nginx's Debian package goes to target/peers"
    (cd "$built" && apt-get download -qq nginx 2>/dev/null && dpkg -x nginx_*.deb nginx && rm nginx_*.deb)
  fi
fi
if has vllm-router || has sglang-router; then install_routers; fi

declare -A mocks
# Starts a mock upstream: mock NAME.
mock() {
  # The file must be there before it is read.
  : >"$work/mock-$1.log"
  taskset -c "$client_core" "$client" mock >"$work/mock-$1.log" 2>&1 &
  started+=($!)
  for _ in $(seq 100); do
    mocks[$1]=$(sed -n 's/^.* listens on //p' "$work/mock-$1.log")
    [ -z "${mocks[$1]}" ] || return 0
    sleep 0.1
  done
  echo "bench-peers: the mock does not start" >&2
  exit 1
}

key=bench-$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
urls=() pids=() names=()
# Adds a server that has started: add NAME PORT.
add() {
  names+=("$1")
  urls+=(--url "$1=http://127.0.0.1:$2")
  pids+=(--pid "$1=$pid")
}
one_request='{"model":"mock","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}'
ask=(-H "authorization: Bearer $key" -H 'content-type: application/json' -d "$one_request")

mock direct
for name in "${peers[@]}"; do
  mock "$name"
  port=$(free_port)
  case $name in
    nginx)
      cat >"$work/nginx.conf" <<CONF
daemon off;
worker_processes 1;
pid $work/nginx.pid;
error_log $work/nginx-error.log;
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path $work/nginx-body;
  proxy_temp_path $work/nginx-proxy;
  fastcgi_temp_path $work/nginx-fastcgi;
  uwsgi_temp_path $work/nginx-uwsgi;
  scgi_temp_path $work/nginx-scgi;
  keepalive_requests 1000000000;
  upstream mock { server ${mocks[nginx]#http://}; keepalive 512; keepalive_requests 1000000000; }
  server {
    listen 127.0.0.1:$port;
    location / {
      proxy_pass http://mock;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }
  }
}
CONF
      start nginx "$built/nginx/usr/sbin/nginx" -p "$work" -c "$work/nginx.conf" -e "$work/nginx-error.log"
      ;;
    vllm-router)
      start vllm-router "$router_venv/bin/vllm-router" --host 127.0.0.1 --port "$port" --worker-urls "${mocks[$name]}" \
        --policy round_robin --prometheus-port "$(free_port)"
      ;;
    sglang-router)
      start sglang-router "$router_venv/bin/sglang-router" launch --host 127.0.0.1 --port "$port" \
        --worker-urls "${mocks[$name]}" --policy round_robin --prometheus-port "$(free_port)"
      ;;
    *) echo "bench-peers: unknown peer: $name" >&2; exit 1 ;;
  esac
  answers "$name" "http://127.0.0.1:$port/v1/chat/completions" "${ask[@]}"
  add "$name" "$port"
done

# With one key that has rates; metrics and logs as they are by default. An upstream gets 8 requests at once by default. Each
# binary runs twice: usage is counted, and in NAME-kept it is also committed to disk before a reply ends.
baton() { # NAME BINARY STATE_FOLDER
  local name=$1 binary=$2 made
  mock "$name"
  port=$(free_port)
  # b3sum is rarely installed: Baton makes a key, whose hash is in its lines.
  made=$("$binary" key new --name bench 2>/dev/null)
  {
    printf 'state_folder = "%s"\n' "$3"
    printf '[[upstream]]\nname = "mock"\nkind = "openai"\nurl = "%s"\nmax_concurrent = 1024\n' "${mocks[$name]}"
    tail -n +2 <<<"$made"
    printf 'requests_per_minute = 4000000000\ntokens_per_minute = 4000000000\n'
  } >"$work/$name.toml"
  head -n 1 <<<"$made" >"$work/$name.key"
  start "$name" "$binary" serve --config "$work/$name.toml" --listen "127.0.0.1:$port"
  answers "$name" "http://127.0.0.1:$port/v1/chat/completions" -H "authorization: Bearer $(cat "$work/$name.key")" \
    "${ask[@]:2}"
  add "$name" "$port"
  pids+=(--api-key-file "$name=$work/$name.key")
}
for binary in "${batons[@]}"; do
  name=${binary%%=*}
  baton "$name" "${binary#*=}" ""
  baton "$name-kept" "${binary#*=}" "$work/$name-state"
done

interval() { for url in "${mocks[@]}"; do curl -fsS -o "$work/answer" -d '' "$url/mock/interval-ms/$1"; done; }
counts() { for name in "${names[@]}"; do curl -fsS "${mocks[$name]}/mock/counts"; echo; done >"$work/counts-$1"; }

proxies=("${urls[@]}" "${pids[@]}" --model mock)
with_direct=(--url "direct=${mocks[direct]}" "${proxies[@]}")
counts before
export BATON_API_KEY=$key
timed=(--rounds "$rounds" --duration "$seconds" --input-words 20)
load json32 "${timed[@]}" "${proxies[@]}" --reply json --concurrency 32 --output-tokens "${JSON_TOKENS:-8}"
counts after
load json128 "${timed[@]}" "${proxies[@]}" --reply json --concurrency 128 --output-tokens "${JSON_TOKENS:-8}"
interval 20
load steady "${timed[@]}" "${with_direct[@]}" --concurrency 256 --output-tokens 100 --stamps --warm-up 4
interval 0
load full "${timed[@]}" "${with_direct[@]}" --concurrency 32 --output-tokens 500 --stamps

# Baton's own engine: the endpoint and its node. A binary at a time, because the node never rests.
for baton in "${batons[@]}"; do
  name=${baton%%=*}
  port=$(free_port)
  start "$name-engine" "${baton#*=}" serve --engine sim --sim-decode-tps 1000000000 --sim-prefill-tps 1000000000 --slots 128 \
    --listen "127.0.0.1:$port" --api-key "$key"
  answers "$name-engine" "http://127.0.0.1:$port/v1/chat/completions" "${ask[@]:0:4}" -d "${one_request/mock/sim}"
  load "engine-$name" "${timed[@]}" --url "$name=http://127.0.0.1:$port" --pid "$name=$pid" --concurrency 128 --output-tokens 200 --ignore-eos
  kill "$pid" && wait "$pid" 2>/dev/null || true
done

versions=()
for name in "${peers[@]}"; do
  case $name in
    nginx) version=$("$built/nginx/usr/sbin/nginx" -v 2>&1) && versions+=("nginx=${version##*/}") ;;
    vllm-router) versions+=("$name=$vllm_version") ;;
    sglang-router) versions+=("$name=$sglang_version") ;;
  esac
done

python3 - "$work" "${names[*]}" "${versions[@]}" <<'PYTHON'
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, "scripts")
from bench_results import Loads, Results, shown

work, names = Path(sys.argv[1]), sys.argv[2].split()
loads = Loads(work)
results = Results("peers", "Beside other proxies", loads.any, sys.argv[3:])
results.head(*names)


def row(name, load, of, digits, unit, better):
    """A row of all servers, and their figures by round."""
    values = {server: [of(figures) for figures in loads.rounds(load, server)] for server in names}
    for server, rounds in values.items():
        results.figure(f"{server}: {name}", unit, better, rounds)
    results.row(name, *(shown(values[server], digits) for server in names))


def added(percentile):
    """Delay from the mock to the client beyond that of the mock asked directly, by server and round."""
    of = loads.percentile("steady", percentile)
    delay = lambda figures: 1e3 * of(figures, "delay")
    direct = [delay(figures) for figures in loads.rounds("steady", "direct")]
    return {n: [delay(f) - d for f, d in zip(loads.rounds("steady", n), direct)] for n in names}


rate = lambda figures: figures["n_replies"] / figures["seconds"]
cpu_requests = lambda figures: 1e3 * figures["cpu_seconds"] / figures["n_replies"]
cpu_tokens = lambda figures: 1e6 * figures["cpu_seconds"] / figures["n_tokens"]
tokens = lambda figures: figures["n_tokens"] / figures["seconds"]
for load, clients in [("json32", 32), ("json128", 128)]:
    row(f"JSON replies, {clients} clients: requests/s", load, rate, 0, "requests_per_second", "more")
    row(f"JSON replies, {clients} clients: CPU s a 1,000 requests", load, cpu_requests, 3, "seconds_per1000_requests", "less")
row("256 streams, a token each 20 ms: CPU s a million tokens", "steady", cpu_tokens, 1, "seconds_per_million_tokens", "less")
delays = {percentile: added(percentile) for percentile in ("p50", "p99")}
for percentile, by_server in delays.items():
    for server, rounds in by_server.items():
        results.figure(f"{server}: delay added to a token, {percentile}", "microseconds", "less", rounds)
results.row("the same: delay added to a token, p50 / p99, µs",
            *(" / ".join(shown(delays[p][n], 0) for p in delays) for n in names))
row("32 streams without pause: CPU s a million tokens", "full", cpu_tokens, 1, "seconds_per_million_tokens", "less")
row("32 streams without pause: tokens/s", "full", tokens, 0, "tokens_per_second", "more")
opened = [[json.loads(line)["connections"] for line in (work / f"counts-{when}").read_text().split("\n") if line]
          for when in ("before", "after")]
results.row("new upstream connections while 32 clients ask for JSON",
            *(str(after - before) for before, after in zip(*opened)))
row("resident after load, MiB", "full", lambda figures: figures["resident_mib"], 0, "mebibytes", "less")
for load in sorted(loads.runs):
    if load.startswith("engine-"):
        name = load.removeprefix("engine-")
        rounds = loads.rounds(load, name)
        cpu, speed = [[of(figures) for figures in rounds] for of in (cpu_tokens, tokens)]
        results.figure(f"{name}, own engine: CPU s a million tokens", "seconds_per_million_tokens", "less", cpu)
        results.figure(f"{name}, own engine: tokens/s", "tokens_per_second", "more", speed)
        results.text(f"{name}, own engine (simulator at full speed), 128 streams: {statistics.median(cpu):.1f} µs of CPU a token, "
                     f"endpoint and node; {statistics.median(speed):,.0f} tokens/s.")
p50, p99 = (loads.percentile("steady", percentile) for percentile in ("p50", "p99"))
direct = [[1e3 * of(figures, "delay") for figures in loads.rounds("steady", "direct")] for of in (p50, p99)]
busiest = max(f["client_cores"] for run in loads.runs.values() for s in run["servers"] for f in s["rounds"])
results.text(f"The mock asked directly: delay p50 / p99 {shown(direct[0], 0)} / {shown(direct[1], 0)} µs. This client used "
             f"{busiest:.2f} cores at most.")
results.publish("peers")
PYTHON
echo "$rounds rounds of $seconds s"
