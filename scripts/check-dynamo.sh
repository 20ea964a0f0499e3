#!/usr/bin/env bash
# Baton in front of NVIDIA Dynamo: its frontend with mocker workers, aggregated and disaggregated. Not part of CI: its packages
# take 0.7 GB under target/dynamo. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/own-network.sh
export BATON=${BATON:-$PWD/target/release/baton}
tests=tests/clients/dynamo
venv=target/dynamo

if [ -z "${DYNAMO_MODEL:-}" ]; then
  install "$tests"
  # The mocker reads the tokenizer and the chat template, and no weights.
  export DYNAMO_MODEL=$PWD/$venv/smollm2
  [ -f "$DYNAMO_MODEL/config.json" ] \
    || "$venv/bin/python" engines/src/mlx/convert.py "$("$BATON" pull smollm2)" "$DYNAMO_MODEL" none
  isolate "$0" "$@"
fi
bound_ports
run_tests "$tests" "$@"
