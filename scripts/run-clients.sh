#!/usr/bin/env bash
# The tests with real clients: pinned packages in an environment of the repository's own.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=target/clients
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" || { echo "run-clients: Python's venv module is missing; the client tests cannot run" >&2; exit 1; }
fi
if ! cmp -s tests/clients/requirements.txt "$venv/installed.txt"; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
  cp tests/clients/requirements.txt "$venv/installed.txt"
fi
BATON=$PWD/target/release/baton "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/clients
