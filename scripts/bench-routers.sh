#!/usr/bin/env bash
# Plays one trace (scripts/router-trace.py) to Baton, sglang-router and vllm-router in turn, each in front of the same four simulated
# servers, which begin anew each time; prints the table of docs/results/planning.md. Linux, at least two cores; under three minutes.
#
#   BATON     the binary (default: target/release/baton)
#   MACHINES  unequal (default) or equal: the servers' speeds
#   ROUTERS   baton sglang-router vllm-router, or fewer
set -euo pipefail
cd "$(dirname "$0")/.."
baton=${BATON:-$PWD/target/release/baton}
. scripts/bench-servers.sh
. scripts/router-packages.sh
needs_binary "$baton"
read -r -a routers <<<"${ROUTERS:-baton sglang-router vllm-router}"
# Prompt tokens and reply tokens a second, slots, and what each further reply makes a step longer.
case ${MACHINES:-unequal} in
  unequal) machines=("5000 30 8 0.05" "8000 60 16 0.03" "3000 70 2 0.2" "1500 50 4 0.1") ;;
  equal) machines=("4000 50 8 0.05" "4000 50 8 0.05" "4000 50 8 0.05" "4000 50 8 0.05") ;;
  *) echo "$me: MACHINES is equal or unequal" >&2; exit 1 ;;
esac
case " ${routers[*]} " in *-router*) install_routers ;; esac

upstreams=()
start_upstreams() {
  upstreams=()
  local prefill decode slots sharing port i=0
  for machine in "${machines[@]}"; do
    read -r prefill decode slots sharing <<<"$machine"
    port=$(free_port)
    start "upstream-$1-$((i += 1))" "$baton" serve --engine sim --listen "127.0.0.1:$port" --state-folder "" \
      --ctx-size 16384 --slots "$slots" --sim-prefill-tps "$prefill" --sim-decode-tps "$decode" --sim-decode-sharing "$sharing"
    answers "an upstream" "http://127.0.0.1:$port/health"
    upstreams+=("http://127.0.0.1:$port $slots")
  done
}

start_router() {
  local router=$1 port=$2 i=0 upstream urls=()
  for upstream in "${upstreams[@]}"; do urls+=("${upstream% *}"); done
  case $router in
    baton)
      for upstream in "${upstreams[@]}"; do
        printf '[[upstream]]\nname = "server-%s"\nkind = "openai"\nurl = "%s"\nmax_concurrent = %s\nmodels = { sim = "sim" }\n' \
          "$((i += 1))" "${upstream% *}" "${upstream#* }"
      done >"$work/baton.toml"
      start baton "$baton" serve --config "$work/baton.toml" --listen "127.0.0.1:$port" --state-folder ""
      ;;
    vllm-router)
      start "$router" "$router_venv/bin/vllm-router" --host 127.0.0.1 --port "$port" --worker-urls "${urls[@]}" \
        --policy cache_aware --prometheus-port "$(free_port)"
      ;;
    sglang-router)
      start "$router" "$router_venv/bin/sglang-router" launch --host 127.0.0.1 --port "$port" --worker-urls "${urls[@]}" \
        --policy cache_aware --prometheus-port "$(free_port)"
      ;;
    *) echo "$me: unknown router: $router" >&2; exit 1 ;;
  esac
}

echo "| router | requests | TTFT, p50 | p99 | completion, mean | cached |"
echo "|---|---|---|---|---|---|"
one_request='{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}'
for router in "${routers[@]}"; do
  start_upstreams "$router"
  port=$(free_port)
  start_router "$router" "$port"
  answers "$router" "http://127.0.0.1:$port/v1/chat/completions" \
    -H 'content-type: application/json' -d "$one_request"
  taskset -c "$client_core" python3 scripts/router-trace.py "$router" "http://127.0.0.1:$port"
  kill "${started[@]}"
  wait 2>/dev/null || true
  started=()
done
echo
echo "$(nproc) cores; sglang-router $sglang_version and vllm-router $vllm_version with cache_aware"
