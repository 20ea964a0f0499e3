#!/usr/bin/env bash
# Coding agents and promptfoo do a task with Baton, which runs a scripted model and is in front of a scripted upstream. Not
# part of CI: their packages take 4 GB under target/ and some minutes to download. Arguments go to pytest, such as `-k codex`.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=tests/agents
venv=target/agents
node=target/agents-node
modules=$PWD/$node/node_modules

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
if ! cmp -s "$tests/requirements.txt" "$venv/installed.txt"; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$tests/requirements.txt"
  cp "$tests/requirements.txt" "$venv/installed.txt"
fi

mkdir -p "$node"
# promptfoo and Qwen Code need a newer Node than some systems have. It is a package of the list.
newer=$(echo "$modules"/node-*/bin)
export PATH=$newer:$PATH
if ! cmp -s "$tests/package.json" "$node/installed.json"; then
  cp "$tests/package.json" "$node"
  npm install --prefix "$node" --ignore-scripts --no-package-lock --no-audit --no-fund --silent
  # These two put the program of this platform into place.
  newer=$(echo "$modules"/node-*/bin)
  export PATH=$newer:$PATH
  (cd "$modules/@anthropic-ai/claude-code" && node install.cjs)
  (cd "$modules/opencode-ai" && node postinstall.mjs)
  cp "$tests/package.json" "$node/installed.json"
fi

export PATH=$modules/.bin:$PATH BATON=${BATON:-$PWD/target/release/baton}
export SCRIPTED_GGUF=${SCRIPTED_GGUF:-$PWD/target/release/scripted-gguf}
"$venv/bin/python" -m pytest -q -p no:cacheprovider -c "$tests/pytest.ini" "$tests" "$@"
