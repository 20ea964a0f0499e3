#!/usr/bin/env bash
# vLLM on the processor: Baton in front of it, alone and as a NIXL pair, and vLLM as a prefill node of Baton (packaging/vllm).
# Not part of CI: its packages take 6.7 GB under target/vllm, for x86-64 Linux. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/own-network.sh
export BATON=${BATON:-$PWD/target/release/baton}
tests=tests/clients/vllm
venv=target/vllm
# Seconds for a reply: two servers that poll share the cores.
export PATIENCE=${PATIENCE:-600}
# MLX as the decode node, if `make clients` has installed it.
if [ -x target/clients-mlx/bin/python ]; then
  export BATON_TEST_MLX_PYTHON=${BATON_TEST_MLX_PYTHON:-$PWD/target/clients-mlx/bin/python}
fi

if [ -z "${VLLM_MODEL:-}" ]; then
  install "$tests"
  gguf=$("$BATON" pull smollm2)
  export VLLM_MODEL=$PWD/$venv/smollm2 VLLM_GGUF=$PWD/$venv/smollm2.gguf
  [ -f "$VLLM_MODEL/config.json" ] || "$venv/bin/python" engines/src/mlx/convert.py "$gguf" "$VLLM_MODEL" f32
  if [ ! -f "$VLLM_GGUF" ]; then
    "$venv/bin/python" "$tests/rounded_gguf.py" "$gguf" "$VLLM_GGUF.part"
    mv "$VLLM_GGUF.part" "$VLLM_GGUF"
  fi
  # Models with layers of several kinds have random weights, since the published ones are large.
  for architecture in Qwen35 NemotronH Gemma3; do
    model=$PWD/$venv/$architecture
    [ ! -f "$model/config.json" ] || continue
    cargo build --quiet --release --locked --workspace --features baton-tiny-gguf/llama --bin random-gguf
    target/release/random-gguf "$architecture" "$model.random.gguf"
    "$venv/bin/python" "$tests/rounded_gguf.py" "$model.random.gguf" "$model.gguf"
    rm -rf "$model.part"
    if [ "$architecture" = NemotronH ]; then
      "$venv/bin/python" "$tests/nemotron_folder.py" "$model.gguf" "$PWD/$venv/Qwen35" "$model.part"
    else
      "$venv/bin/python" engines/src/mlx/convert.py "$model.gguf" "$model.part" f32
      "$venv/bin/python" "$tests/hub_folder.py" "$model.part"
    fi
    mv "$model.part" "$model"
  done
  export VLLM_HYBRID=$PWD/$venv/Qwen35 VLLM_MAMBA=$PWD/$venv/NemotronH VLLM_WINDOWED=$PWD/$venv/Gemma3
  isolate "$0" "$@"
fi
bound_ports
run_tests "$tests" "$@"
