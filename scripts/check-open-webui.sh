#!/usr/bin/env bash
# Open WebUI in a headless browser, connected to Baton by Ollama's and by OpenAI's API, with the default model and a tiny
# projector. Not part of CI: Open WebUI's packages take 2 GB under target/. Needs Chromium. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=tests/open_webui
venv=target/open-webui

command -v chromium >/dev/null || command -v google-chrome >/dev/null \
  || { echo "check-open-webui: please install chromium" >&2; exit 1; }
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
if ! cmp -s "$tests/requirements.txt" "$venv/installed.txt"; then
  # uv can leave out a dependency; pip cannot.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --override "$tests/overrides.txt" -r "$tests/requirements.txt"
  cp "$tests/requirements.txt" "$venv/installed.txt"
fi

export BATON=${BATON:-$PWD/target/release/baton} MMPROJ=$PWD/target/projector.gguf
# The default model has rows of 576 values.
cargo build --quiet --release --locked --workspace --bin projector-gguf
target/release/projector-gguf 576 "$MMPROJ"
"$venv/bin/python" -m pytest -q -p no:cacheprovider -c "$tests/pytest.ini" "$tests" "$@"
