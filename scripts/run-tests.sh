#!/usr/bin/env bash
# All tests with one runner. cargo's own runs everywhere; the real-model tests are in processes of their own.
set -euo pipefail
export BATON_TEST_MODEL BATON_TEST_SWA_MODEL
BATON_TEST_MODEL=$(target/release/baton pull smollm2)
# A model with a sliding window. Its licence allows tests and no more.
BATON_TEST_SWA_MODEL=$(target/release/baton pull gemma3-270m)
# Real-model tests compute on one thread each.
cargo test --release --locked --workspace --no-fail-fast -- --test-threads="${TEST_THREADS:-2}"
scripts/run-clients.sh
