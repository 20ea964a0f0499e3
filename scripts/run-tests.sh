#!/usr/bin/env bash
# All tests with one runner. cargo's own runs everywhere; the real-model tests are in processes of their own.
set -euo pipefail
export BATON_TEST_MODEL
BATON_TEST_MODEL=$(target/release/baton pull smollm2)
# Real-model tests compute on one thread each.
cargo test --release --locked --workspace --no-fail-fast -- --test-threads="${TEST_THREADS:-2}"
scripts/run-clients.sh
