#!/usr/bin/env bash
# The tests with real clients: pinned packages in their own environments under target/.
# `run-clients.sh prepare` only fetches the packages; `run-clients.sh build` also compiles Rust's clients. For `make test-long`:
# `run-clients.sh schemathesis` tries all that the judge can make up, `run-clients.sh mlx` runs in front of mlx-lm's server,
# `run-clients.sh other-routes` runs each test by the route that BATON_TEST_ROUTES=one leaves out (tests/clients/conftest.py).
set -euo pipefail
cd "$(dirname "$0")/.."
export BATON=$PWD/target/release/baton

# Reports what is left out and why. Under CI nothing may be left out.
skip() {
  echo "run-clients: SKIPPED: $1" >&2
  [ -z "${CI:-}" ] || exit 1
}

# A Python environment with the packages of a list: environment FOLDER LIST
environment() {
  if [ ! -x "$1/bin/python" ]; then
    python3 -m venv "$1" || { echo "run-clients: Python's venv module is missing; the client tests cannot run" >&2; exit 1; }
  fi
  if ! cmp -s "$2" "$1/installed.txt"; then
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check -r "$2" || return 1
    cp "$2" "$1/installed.txt"
  fi
}
pytest_with() { "$1/bin/python" -m pytest -q -rfEs -p no:cacheprovider -c "$2" "${@:3}"; } # ENVIRONMENT SETTINGS ARGUMENTS...
run_tests() { pytest_with "$1" tests/clients/pytest.ini "${@:2}"; }

case "${1:-}" in
  schemathesis)
    environment target/clients tests/clients/requirements.txt
    SCHEMATHESIS=long run_tests target/clients tests/clients/test_judge_schemathesis.py
    exit
    ;;
  mlx)
    # Its packages are built for Linux with glibc 2.35 or newer, and for Macs.
    if ! environment target/clients-mlx tests/clients/mlx/requirements.txt; then
      skip "mlx-lm does not install here, so the tests in front of its server do not run"
      exit
    fi
    run_tests target/clients-mlx -p no:warnings tests/clients/mlx
    exit
    ;;
esac

environment target/clients tests/clients/requirements.txt
environment target/clients-openai-2 tests/clients/openai_2/requirements.txt

# Fetches the agent that CI runs, the smallest of tests/agents: one program of 60 MB to download, for this platform.
opencode=
fetch_opencode() {
  opencode=opencode-$(node -p 'process.platform + "-" + process.arch')
  local wanted
  wanted=$opencode@$(node -p "require('./tests/agents/package.json').dependencies['opencode-ai']")
  [ "$(cat target/opencode/installed.txt 2>/dev/null)" != "$wanted" ] || return 0
  mkdir -p target/opencode
  npm install --prefix target/opencode --silent --no-audit --no-fund --ignore-scripts --no-package-lock "$wanted"
  echo "$wanted" > target/opencode/installed.txt
}

# The live page's tests: Playwright drives Debian's Chromium, so its own browsers are not downloaded.
page=
prepare_page() {
  if ! node -e 'process.exit(process.versions.node.split(".")[0] >= 20 ? 0 : 1)'; then
    skip "Node is older than 20, so the live page is not tested"
    return
  fi
  if ! command -v "${CHROMIUM:-chromium}" >/dev/null; then
    skip "there is no chromium, so the live page is not tested"
    return
  fi
  page=$PWD/target/page-tests
  mkdir -p "$page"
  if ! cmp -s tests/page/package-lock.json "$page/installed.json"; then
    cp tests/page/package.json tests/page/package-lock.json "$page"
    PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 npm ci --prefix "$page" --silent --no-audit --no-fund --ignore-scripts
    cp tests/page/package-lock.json "$page/installed.json"
  fi
  rm -f "$page"/*.mjs
  cp tests/page/*.mjs "$page"
}

# Node's packages are in the same folder as the tests, because Node searches imports from a module's own folder.
node=target/clients-node
if ! node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 18 || (a == 18 && b >= 17) ? 0 : 1)' 2>/dev/null; then
  skip "there is no Node of version 18.17 or newer, so the tests of Node's clients do not run"
elif ! command -v npm >/dev/null; then
  skip "there is no npm, so the tests of Node's clients do not run"
else
  mkdir -p "$node"
  if ! cmp -s tests/clients/node/package-lock.json "$node/installed.json"; then
    cp tests/clients/node/package.json tests/clients/node/package-lock.json "$node"
    npm ci --prefix "$node" --silent --no-audit --no-fund --ignore-scripts
    cp tests/clients/node/package-lock.json "$node/installed.json"
  fi
  cp tests/clients/node/*.mjs examples/*.mjs "$node"
  node "$node/templates.mjs"
  export BATON_NODE_CLIENTS=$PWD/$node
  fetch_opencode
  prepare_page
fi

[ "${1:-}" != prepare ] || exit 0

# Without what takes a server of another kind. Each worker starts servers of its own, so no other test's streams share their
# batches. A test that hangs is named.
clients() {
  run_tests target/clients -n 3 --timeout 300 tests/clients --ignore tests/clients/openai_2 --ignore tests/clients/mlx \
    --ignore tests/clients/dynamo --ignore tests/clients/vllm
}

# Rust's clients and their example, which test_rust.py runs.
cargo test --quiet --locked --no-run --manifest-path tests/clients/rust/Cargo.toml --target-dir target/clients-rust
cargo build --quiet --locked --example chat --manifest-path tests/clients/rust/Cargo.toml --target-dir target/clients-rust

export BATON_RERANKER=$PWD/target/reranker.gguf
# With --workspace, dependencies have the features that everything else is built with, and are not compiled again.
cargo build --quiet --release --locked --workspace --bin reranker-gguf --bin scripted-gguf
target/release/reranker-gguf "$BATON_RERANKER"
export SCRIPTED_GGUF=$PWD/target/release/scripted-gguf

case "${1:-}" in
  build) exit ;;
  other-routes)
    export BATON_TEST_ROUTES=other
    status=0
    clients || status=1
    run_tests target/clients-openai-2 tests/clients/openai_2 || status=1
    exit "$status"
    ;;
esac

# Tests that mostly wait, beside the clients that make the model compute.
others() {
  local status=0
  # vLLM's connector, without vLLM.
  run_tests target/clients packaging/vllm/tests || status=1
  if [ -n "$opencode" ]; then
    PATH=$PWD/target/opencode/node_modules/$opencode/bin:$PATH \
      pytest_with target/clients tests/agents/pytest.ini tests/agents -k opencode || status=1
  fi
  if [ -n "$page" ]; then
    (cd "$page" && ../../scripts/timed.sh "live page" node_modules/.bin/playwright test) || status=1
  fi
  run_tests target/clients-openai-2 tests/clients/openai_2 || status=1
  return "$status"
}
others > target/other-clients.log 2>&1 &
lane=$!
trap 'kill "$lane" 2>/dev/null || true' EXIT

status=0
clients || status=1
wait "$lane" || status=1
cat target/other-clients.log
exit $status
