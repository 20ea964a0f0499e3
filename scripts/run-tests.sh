#!/usr/bin/env bash
# All Rust tests, then the tests with real clients. Prints the seconds of each part.
set -euo pipefail
cd "$(dirname "$0")/.."
export BATON_TEST_MODEL BATON_TEST_SWA_MODEL
BATON_TEST_MODEL=$(target/release/baton pull smollm2)
# A model with a sliding window. Its licence allows tests and no more.
BATON_TEST_SWA_MODEL=$(target/release/baton pull gemma3-270m)
# An engine in a test computes on one thread, so two tests fill two cores.
scripts/timed.sh "Rust tests" \
  cargo test --release --locked --workspace --no-fail-fast -- --test-threads="${TEST_THREADS:-2}"
scripts/timed.sh "client tests" scripts/run-clients.sh
