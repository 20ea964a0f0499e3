#!/usr/bin/env bash
# The thin build compiles and starts without a C++ compiler: c++ and cmake are hidden behind commands that fail.
# With `check` the compiler only checks it. scripts/check-arm.sh runs this with Cargo's variables for another target.
set -euo pipefail
# shellcheck source=scripts/without-cpp.sh
source "$(dirname "$0")/without-cpp.sh"
if [ "${1:-}" = check ]; then
  without_cpp check --package baton --package baton-bench
  echo "thin build: checked without C++"
  exit
fi
# In the folder of the whole build, which shares most crates. Crates that differ between the two are compiled for this check
# alone, so they are not optimised.
unoptimised=()
for crate in baton baton-bench baton-cli baton-engines baton-fetch baton-node baton-proxy baton-tryout; do
  unoptimised+=(--config "profile.release.package.$crate.opt-level=0")
done
build_without_cpp thin --package baton --package baton-bench "${unoptimised[@]}"
"$hide/thin" serve --engine sim --listen 127.0.0.1:0 > "$hide/out" 2>&1 &
server=$!
wait_for_address 10
curl -fsS --max-time 10 "$base/v1/chat/completions" -d '{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":8}' \
  | grep -q '"finish_reason"' || { echo "the thin build does not answer" >&2; exit 1; }
"$hide/thin" bench serve --url "$base" --requests 8 --rounds 1 --warm-up 0 > "$hide/bench" 2>&1 \
  || { cat "$hide/bench" >&2; exit 1; }
echo "thin build: compiled without C++, started, answered, measured itself"
