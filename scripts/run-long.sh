#!/usr/bin/env bash
# What `make test` leaves out because it takes minutes and seldom breaks. A promise is in one of the two. Writes the seconds and
# the outcome of each step into LONG_PAGE, if it is set.
set -uo pipefail
cd "$(dirname "$0")/.."
# One build for all steps, with candle, which `make test` leaves out.
build=(--release --locked --workspace --features baton/candle)
cargo build --quiet "${build[@]}" || exit
export BATON_TEST_MODEL BATON_TEST_SWA_MODEL
BATON_TEST_MODEL=$(target/release/baton pull smollm2) || exit
BATON_TEST_SWA_MODEL=$(target/release/baton pull gemma3-270m) || exit

status=0
rows=
run() { # NAME COMMAND...
  local began=$SECONDS outcome=passed
  echo "--- $1"
  "${@:2}" || { outcome=failed; status=1; }
  rows+="| $1 | $outcome | $((SECONDS - began)) |"$'\n'
  echo "step: $1 took $((SECONDS - began)) s and $outcome"
}

# The modules whose tests draw random cases, as libtest's filters.
random_cases() {
  local filters
  filters=$(grep -rl 'proptest!' schemas engines proxy --include='*.rs' | sed -E 's/\.rs$//; s/\/mod$//' | awk -F/ '
    /\/tests\// { print $NF "::"; next }
    $NF == "tests" { print $(NF - 1) "::tests"; next }
    { print $NF "::tests" }')
  # shellcheck disable=SC2086  # a list of names
  PROPTEST_CASES=${LONG_CASES:-4000} cargo test "${build[@]}" --no-fail-fast --lib --test kv -- $filters
}

# Fails if there is no such test, which `cargo test` does not: one_test BINARY NAME ARGUMENTS...
one_test() {
  local log
  log=$(mktemp)
  cargo test "${build[@]}" --test "$1" -- "$2" --exact "${@:3}" | tee "$log"
  [ "${PIPESTATUS[0]}" = 0 ] && grep -q '^test result: ok. 1 passed' "$log"
}

mlx_engine() {
  if [ ! -x target/clients-mlx/bin/python ]; then
    echo "SKIPPED: mlx-lm does not install here"
    [ -z "${CI:-}" ]
    return
  fi
  BATON_TEST_MLX_PYTHON=$PWD/target/clients-mlx/bin/python \
    cargo test "${build[@]}" --test engines -- mlx --test-threads=1
}

run "random cases" random_cases
# The limit of the endpoint's memory is that of an optimised program only here: `make test` does not optimise it.
run "memory of the optimised endpoint" one_test real_model start_up::the_endpoint_is_small_and_starts_quickly
run "candle with the default model" one_test engines candle::candle_keeps_the_contract --ignored
run "clients by their other route" scripts/run-clients.sh other-routes
run "schemathesis" scripts/run-clients.sh schemathesis
run "mlx-lm's server" scripts/run-clients.sh mlx
run "the mlx engine" mlx_engine
run "quickstart" scripts/quickstart.sh
run "thin build" scripts/check-thin-build.sh

if [ -n "${LONG_PAGE:-}" ]; then
  python3 - "$LONG_PAGE" "$rows" <<'EOF'
import datetime, os, pathlib, re, sys
page, rows = pathlib.Path(sys.argv[1]), sys.argv[2]
head = f"The last run of `make test-long`: {datetime.date.today()}, {os.cpu_count()} cores."
table = f"<!-- long run -->\n{head}\n\n| step | outcome | seconds |\n|---|---|---|\n{rows}<!-- end -->"
text, n = re.subn(r"<!-- long run -->.*<!-- end -->", lambda _: table, page.read_text(), flags=re.S)
assert n == 1, f"{page} has no place for the run"
page.write_text(text)
EOF
fi
exit $status
