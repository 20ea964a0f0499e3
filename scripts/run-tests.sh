#!/usr/bin/env bash
# All tests with one runner. cargo's own runs everywhere; the real-model tests are in processes of their own.
set -euo pipefail
# Real-model tests compute: on a small machine two at once only wait for each other.
cargo test --release --locked --workspace --no-fail-fast -- --test-threads="${TEST_THREADS:-2}"
scripts/run-clients.sh
