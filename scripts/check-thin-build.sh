#!/usr/bin/env bash
# The thin build compiles and starts without a C++ compiler: c++ and cmake are hidden behind commands that fail.
# scripts/check-arm.sh runs this with Cargo's variables for another target.
set -euo pipefail
hide=$(mktemp -d)
trap 'rm -rf "$hide"; [ -z "${server:-}" ] || kill "$server" 2>/dev/null || true' EXIT
for tool in c++ g++ aarch64-linux-gnu-g++ clang++ cmake ninja; do
  printf '#!/bin/sh\necho "the thin build must not call %s" >&2\nexit 1\n' "$tool" > "$hide/$tool"
  chmod +x "$hide/$tool"
done
# In the folder of the whole build, which shares most crates. Crates that differ between the two are compiled for this check
# alone, so they are not optimised.
unoptimised=()
for crate in baton baton-bench baton-cli baton-engines baton-fetch baton-proxy; do
  unoptimised+=(--config "profile.release.package.$crate.opt-level=0")
done
PATH="$hide:$PATH" CXX="$hide/c++" cargo build --release --locked --no-default-features "${unoptimised[@]}"
# Move it away, so that nothing mistakes it for the full binary.
mv "${CARGO_TARGET_DIR:-target}/${CARGO_BUILD_TARGET:-}/release/baton" "$hide/thin"
"$hide/thin" serve --engine sim --listen 127.0.0.1:0 > "$hide/out" 2>&1 &
server=$!
for _ in $(seq 100); do
  grep -q 'Baton serves' "$hide/out" && break
  kill -0 "$server" || { cat "$hide/out" >&2; exit 1; }
  sleep 0.1
done
base=$(grep -o 'http://[0-9.:]*' "$hide/out" | head -n 1)
curl -fsS --max-time 10 "$base/v1/chat/completions" -d '{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":8}' \
  | grep -q '"finish_reason"' || { echo "the thin build does not answer" >&2; exit 1; }
"$hide/thin" bench serve --url "$base" --requests 8 --rounds 1 --warm-up 0 > "$hide/bench" 2>&1 \
  || { cat "$hide/bench" >&2; exit 1; }
echo "thin build: compiled without C++, started, answered, measured itself"
