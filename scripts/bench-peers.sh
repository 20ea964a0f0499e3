#!/usr/bin/env bash
# Measures Baton in front of an upstream beside nginx, vllm-router and sglang-router in one run, and Baton in front of its
# own simulated engine; prints the table of docs/results/endpoint.md. Linux, at least two cores: the servers are pinned to one,
# the client and the mock upstreams to another.
#
#   BATONS   the binaries to measure, NAME=PATH … (default: baton=target/dist/baton)
#   CLIENT   the benchmarks (default: target/dist/baton-bench)
#   ROUNDS, SECONDS_A_ROUND   3 and 6
#   JSON_TOKENS   tokens of a JSON reply (8)
#   PEERS    nginx vllm-router sglang-router, or fewer
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

# With one key that has rates; metrics and logs as they are by default. An upstream gets 8 requests at once by default.
for baton in "${batons[@]}"; do
  name=${baton%%=*}
  mock "$name"
  port=$(free_port)
  # b3sum is rarely installed: Baton makes a key, whose hash is in its lines.
  made=$("${baton#*=}" key new --name bench 2>/dev/null)
  {
    printf '[[upstream]]\nname = "mock"\nkind = "openai"\nurl = "%s"\nmax_concurrent = 1024\n' "${mocks[$name]}"
    tail -n +2 <<<"$made"
    printf 'requests_per_minute = 4000000000\ntokens_per_minute = 4000000000\n'
  } >"$work/$name.toml"
  head -n 1 <<<"$made" >"$work/$name.key"
  start "$name" "${baton#*=}" serve --config "$work/$name.toml" --listen "127.0.0.1:$port"
  answers "$name" "http://127.0.0.1:$port/v1/chat/completions" -H "authorization: Bearer $(cat "$work/$name.key")" \
    "${ask[@]:2}"
  add "$name" "$port"
  pids+=(--api-key-file "$name=$work/$name.key")
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

python3 - "$work" "${names[@]}" <<'PYTHON'
import json
import statistics
import sys
from pathlib import Path

work, names = Path(sys.argv[1]), sys.argv[2:]
run = {path.stem: json.loads(path.read_text()) for path in work.glob("*.json")}


def rounds(load, name):
    return next(server["rounds"] for server in run[load]["servers"] if server["name"] == name)


def median(load, of):
    return {name: statistics.median(map(of, rounds(load, name))) for name in names}


def added(index):
    """Delay from the mock to the client beyond that of the mock asked directly, by round."""
    delay = lambda figures: 1e3 * figures["latencies"]["delay"]["percentiles_ms"][index]
    direct = [delay(figures) for figures in rounds("steady", "direct")]
    return {n: statistics.median(delay(f) - d for f, d in zip(rounds("steady", n), direct)) for n in names}


def row(name, values, digits):
    print(f"| {name} | " + " | ".join(f"{values[n]:,.{digits}f}" for n in names) + " |")


rate = lambda figures: figures["n_replies"] / figures["seconds"]
cpu_requests = lambda figures: 1e3 * figures["cpu_seconds"] / figures["n_replies"]
cpu_tokens = lambda figures: 1e6 * figures["cpu_seconds"] / figures["n_tokens"]
p50, p99 = added(1), added(3)
opened = [[json.loads(line)["connections"] for line in (work / f"counts-{when}").read_text().split("\n") if line]
          for when in ("before", "after")]
connections = {name: after - before for name, before, after in zip(names, *opened)}
print("\n| | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
row("JSON replies, 32 clients: requests/s", median("json32", rate), 0)
row("the same: CPU s a 1,000 requests", median("json32", cpu_requests), 3)
row("JSON replies, 128 clients: requests/s", median("json128", rate), 0)
row("the same: CPU s a 1,000 requests", median("json128", cpu_requests), 3)
row("256 streams, a token each 20 ms: CPU s a million tokens", median("steady", cpu_tokens), 1)
print("| the same: delay added to a token, p50 / p99, µs | "
      + " | ".join(f"{p50[n]:,.0f} / {p99[n]:,.0f}" for n in names) + " |")
row("32 streams without pause: CPU s a million tokens", median("full", cpu_tokens), 1)
row("the same: tokens/s", median("full", lambda f: f["n_tokens"] / f["seconds"]), 0)
row("new upstream connections while 32 clients ask for JSON", connections, 0)
row("resident after load, MiB", {n: rounds("full", n)[-1]["resident_mib"] for n in names}, 0)
for load in sorted(run):
    if load.startswith("engine-"):
        name = load.removeprefix("engine-")
        cpu = statistics.median(map(cpu_tokens, rounds(load, name)))
        speed = statistics.median(f["n_tokens"] / f["seconds"] for f in rounds(load, name))
        print(f"\n{name}, own engine (simulator at full speed), 128 streams: {cpu:.1f} µs of CPU a token, endpoint and node; "
              f"{speed:,.0f} tokens/s")
direct = [f["latencies"]["delay"]["percentiles_ms"] for f in rounds("steady", "direct")]
print(f"\nThe mock asked directly: delay p50 / p99 {1e3 * statistics.median(d[1] for d in direct):,.0f} / "
      f"{1e3 * statistics.median(d[3] for d in direct):,.0f} µs. This client used "
      f"{max(f['client_cores'] for load in run for s in run[load]['servers'] for f in s['rounds']):.2f} cores at most.")
PYTHON
echo
line=$(machine)
for name in "${peers[@]}"; do
  case $name in
    nginx) version=$("$built/nginx/usr/sbin/nginx" -v 2>&1) && line+="; ${version#* version: }" ;;
    vllm-router) line+="; $name $vllm_version" ;;
    sglang-router) line+="; $name $sglang_version" ;;
  esac
done
echo "$line; $rounds rounds of $seconds s"
