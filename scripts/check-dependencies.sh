#!/usr/bin/env bash
# cli, bench -> node, tryout -> proxy -> planner, reply, fetch, pairing; proxy -> engines -> link, model, process;
# proxy -> upstream -> link; engines, proxy -> store; link, model, process, store, fetch -> schemas: no crate depends on one above it, and the pure crates stay
# free of I/O.
set -euo pipefail
deps() { cargo tree --locked --quiet -p "$1" --edges normal --prefix none --all-features | awk '{print $1}' | sort -u; }
fail=0
forbid() {
  local crate=$1; shift
  local found
  found=$(deps "$crate" | grep -Fx "$(printf '%s\n' "$@")" || true)
  if [ -n "$found" ]; then echo "$crate must not depend on: $(echo "$found" | tr '\n' ' ')" >&2; fail=1; fi
}
above_proxy=(baton-cli baton-bench baton-node baton-tryout)
above_engines=("${above_proxy[@]}" baton-proxy baton-fetch baton-pairing baton-planner baton-reply)
engines=(baton-engines baton-upstream baton-link baton-model)
forbid baton-schemas "${engines[@]}" baton-process "${above_engines[@]}" tokio axum hyper reqwest llama-cpp-2
forbid baton-engines baton-upstream "${above_engines[@]}" clap
forbid baton-upstream baton-engines baton-model baton-process "${above_engines[@]}" clap llama-cpp-2
forbid baton-link baton-engines baton-upstream baton-model baton-process "${above_engines[@]}" clap llama-cpp-2
forbid baton-model baton-engines baton-upstream baton-link baton-process "${above_engines[@]}" clap axum hyper reqwest llama-cpp-2
forbid baton-process "${engines[@]}" "${above_engines[@]}" clap axum reqwest llama-cpp-2
forbid baton-store "${engines[@]}" baton-process "${above_engines[@]}" tokio axum hyper reqwest clap llama-cpp-2
forbid baton-fetch "${above_proxy[@]}" baton-proxy "${engines[@]}" baton-pairing baton-planner baton-reply axum clap
forbid baton-pairing "${above_proxy[@]}" baton-proxy "${engines[@]}" baton-schemas baton-fetch baton-planner baton-reply axum reqwest clap
for pure in baton-planner baton-reply; do
  forbid "$pure" "${above_proxy[@]}" baton-proxy "${engines[@]}" baton-fetch baton-pairing tokio axum hyper reqwest llama-cpp-2 clap
done
forbid baton-proxy "${above_proxy[@]}" llama-cpp-2 clap_complete clap_mangen
forbid baton-tryout baton-cli baton-bench baton-node plotters
forbid baton-node baton-cli baton-bench baton-tryout clap_complete
forbid baton-bench baton-cli
# What only measures is not in the program that people install.
forbid baton baton-bench plotters hdrhistogram
if cargo tree --locked --quiet -p baton --edges normal --prefix none --format '{p} {f}' | grep '^baton-engines .*measure'; then
  echo "baton must be built without the feature \"measure\" of baton-engines" >&2; fail=1
fi
# Model code runs in baton-engines alone; the proxy reaches it through a process.
if grep -rn 'llama_cpp_2\|llama_cpp_sys_2\|candle_core\|candle_nn' schemas proxy engines/*/src --include='*.rs'; then
  echo "llama.cpp and candle may be used in engines/src/ only" >&2; fail=1
fi
# Only five modules may use unsafe: what llama.cpp's binding does not offer.
if grep -rnE '\bunsafe( impl| fn|\s*\{)' schemas engines proxy --include='*.rs' | grep -vE '^engines/src/llama/(state|state_tap|queries|rpc|head).rs:'; then
  echo "unsafe is allowed in engines/src/llama/state.rs, state_tap.rs, queries.rs, rpc.rs and head.rs only" >&2; fail=1
fi
exit $fail
