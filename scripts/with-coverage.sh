#!/usr/bin/env bash
# RUSTC_WORKSPACE_WRAPPER of scripts/fuzz.sh: compiles Baton's own crates so that libFuzzer sees which code an input reaches.
exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares
