#!/usr/bin/env bash
# All Rust tests, then the tests with real clients. Prints the seconds of each part.
set -euo pipefail
cd "$(dirname "$0")/.."
export BATON_TEST_MODEL BATON_TEST_CUT_MODEL BATON_TEST_SWA_MODEL
# The default model, in a type that llama.cpp computes in half the time, and its first 6 of 30 layers for what needs no good text.
BATON_TEST_MODEL=$PWD/target/smollm2.q8_0.gguf
BATON_TEST_CUT_MODEL=$PWD/target/smollm2.q8_0.cut6.gguf
cargo build --quiet --release --locked --workspace --bin q8-gguf
default=$(target/release/baton pull smollm2)
[ -e "$BATON_TEST_MODEL" ] || target/release/q8-gguf "$default" "$BATON_TEST_MODEL"
[ -e "$BATON_TEST_CUT_MODEL" ] || target/release/q8-gguf "$default" "$BATON_TEST_CUT_MODEL" 6
# A model with a sliding window. Its licence allows tests and no more.
BATON_TEST_SWA_MODEL=$(target/release/baton pull gemma3-270m)
# Random cases of each property; `make test-long` tries more.
export PROPTEST_CASES=${PROPTEST_CASES:-50}

# A test that hangs must not take all of CI's time: cargo has named it by then, and the other parts still run.
limit=()
[ -z "${CI:-}" ] || limit=(timeout --kill-after=10 "${PART_SECONDS:-2400}")

status=0
run() { # NAME THREADS WHICH_TESTS...
  local name=$1 threads=$2
  shift 2
  scripts/timed.sh "$name" ${limit[@]+"${limit[@]}"} cargo test --release --locked --workspace --no-fail-fast "$@" -- --test-threads="$threads"
}
# Every other test binary of the workspace, new ones included, and the programs that have tests.
others=$(cargo metadata --no-deps --locked --format-version 1 | python3 -c '
import json, sys
targets = [target for package in json.load(sys.stdin)["packages"] for target in package["targets"] if target["test"]]
named = {("--" + kind, target["name"]) for target in targets for kind in target["kind"] if kind in ("bin", "test")}
for kind, name in sorted(named - {("--test", name) for name in ("endpoint", "real_model", "stress")}):
    print(kind, name)')
# Two lanes of tests at once. In one, simulated engines wait most of the time, so many of these tests run at once; then come the
# programs with the real model, which wait for one another. In the other one everything else computes. The clients are compiled
# meanwhile, with a lower priority. If that fails, scripts/run-clients.sh compiles again and says why.
nice -n 19 scripts/run-clients.sh build > target/clients-build.log 2>&1 &
clients=$!
programs() {
  local status=0
  run "endpoint tests" "${ENDPOINT_TEST_THREADS:-6}" --test endpoint || status=1
  run "real model tests" "${TEST_THREADS:-2}" --test real_model || status=1
  return "$status"
}
programs > target/program-tests.log 2>&1 &
lane=$!
# An engine computes on one thread in a test, so two tests fill two cores.
# shellcheck disable=SC2086  # a list of names
run "other Rust tests" "${TEST_THREADS:-2}" --lib $others || status=1
wait "$lane" || status=1
cat target/program-tests.log
# Without other tests, because these load the machine. Only the few documentation tests are compiled meanwhile.
run "documentation tests" "${TEST_THREADS:-2}" --doc > target/documentation-tests.log 2>&1 &
lane=$!
run "stress tests" "${TEST_THREADS:-2}" --test stress || status=1
wait "$lane" || status=1
cat target/documentation-tests.log
wait "$clients" || true
# Each by one of its two routes; `make test-long` runs the other half.
BATON_TEST_ROUTES=one scripts/timed.sh "client tests" scripts/run-clients.sh || status=1
exit $status
