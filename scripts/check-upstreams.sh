#!/usr/bin/env bash
# Baton in front of llama.cpp's llama-server and of llama-cpp-python's server, which are built first. Not part of CI.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export BATON=$PWD/target/release/baton
tests=tests/clients/llama_cpp
built=$PWD/target/upstreams
venv=target/clients-llama-cpp

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
if ! cmp -s "$tests/requirements.txt" "$venv/installed.txt"; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$tests/requirements.txt"
  cp "$tests/requirements.txt" "$venv/installed.txt"
fi

scripts/build-llama-server.sh

cargo build --quiet --release --locked --workspace --bin projector-gguf
# For rows of 576 values, as SmolLM2-135M has them.
export BATON_PROJECTOR=$PWD/target/projector.gguf
target/release/projector-gguf 576 "$BATON_PROJECTOR"

# llama-cpp-python runs from its source folder with the libraries of llama-server.
export BATON_UPSTREAMS=$built
"$venv/bin/python" -m pytest -q -rs -p no:cacheprovider -p no:warnings -c tests/clients/pytest.ini "$tests" "$@"
