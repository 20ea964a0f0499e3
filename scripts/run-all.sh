#!/usr/bin/env bash
# Everything CI runs, step by step. `make test` calls it once the build tools are installed.
set -euo pipefail
cd "$(dirname "$0")/.."
timed=scripts/timed.sh
began=$SECONDS
# Our own crates are not optimised for tests: they compile in a quarter of the time, and what computes is in the others.
export CARGO_PROFILE_RELEASE_OPT_LEVEL=0

$timed "setup" scripts/setup.sh test
# The clients' packages are downloaded while the compiler works.
mkdir -p target
scripts/run-clients.sh prepare > target/clients-prepare.log 2>&1 &
prepare=$!
# The checks that need no compiler run meanwhile, too.
without_compiler() {
  $timed "packages of a stub program" scripts/package/test.py && $timed "live page's build" scripts/check-page.sh
}
without_compiler > target/without-compiler.log 2>&1 &
checks=$!
trap 'kill "$prepare" "$checks" 2>/dev/null || true' EXIT

make --no-print-directory check
wait "$checks" || { cat target/without-compiler.log >&2; exit 1; }
cat target/without-compiler.log
$timed "thin build" scripts/check-thin-build.sh check
# With the tests Cargo builds the programs that they start: baton and baton-bench. A build of baton alone before it would compile
# most of our crates twice, because tests turn on what measures.
$timed "build of the programs and the tests" cargo test --release --locked --workspace --no-run --quiet
wait "$prepare" || { cat target/clients-prepare.log >&2; exit 1; }
scripts/run-tests.sh
echo "step: everything took $((SECONDS - began)) s"
