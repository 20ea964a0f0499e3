#!/usr/bin/env bash
# Baton in front of NVIDIA Dynamo: its frontend with mocker workers, aggregated and disaggregated. Not part of CI: its packages
# take 0.7 GB under target/dynamo. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export BATON=${BATON:-$PWD/target/release/baton}
tests=tests/clients/dynamo
venv=target/dynamo

if [ -z "${DYNAMO_MODEL:-}" ]; then
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  if ! cat "$tests"/{requirements,packages}.txt | cmp -s - "$venv/installed.txt"; then
    pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
    "${pip[@]}" install -r "$tests/requirements.txt"
    "${pip[@]}" install --no-deps -r "$tests/packages.txt"
    cat "$tests"/{requirements,packages}.txt > "$venv/installed.txt"
  fi
  # The mocker reads the tokenizer and the chat template, and no weights.
  export DYNAMO_MODEL=$PWD/$venv/smollm2
  [ -f "$DYNAMO_MODEL/config.json" ] \
    || "$venv/bin/python" engines/src/mlx/convert.py "$("$BATON" pull smollm2)" "$DYNAMO_MODEL" none
  # A network of its own: Dynamo listens on random ports beyond loopback.
  exec unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi

ip link set lo up
# Dynamo's servers have ports below these.
echo 20000 20999 > /proc/sys/net/ipv4/ip_local_port_range
"$venv/bin/python" -m pytest -q -rs -p no:cacheprovider -p no:warnings -c tests/clients/pytest.ini "$tests" "$@"
