#!/usr/bin/env bash
# Builds Baton with candle for an NVIDIA card, beside llama.cpp for processors: target/candle-cuda/release has the program and
# its folder `lib`, to be copied together. Unlike the build with llama.cpp's CUDA, it starts only where a driver is.
#   ARCH    the card's architecture, such as 121 for a DGX Spark (default: this machine's, else 90, a Hopper)
#   TESTS   names of the engines' tests that are built and run with it (see scripts/bundle.sh); they need the card
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts/setup.sh build
card=$({ nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } \
  | sed -n 's/^\([0-9]\{1,2\}\)\.\([0-9]\)$/\1\2/p' | head -n 1)
arch=${ARCH:-${card:-90}}
[[ $arch =~ ^[0-9]{2,3}a?$ ]] || { echo "cuda: ARCH=\"$arch\" is no architecture; 121 is one" >&2; exit 2; }
toolkit=$(scripts/cuda/toolkit.sh candle "$arch")
echo "cuda: building candle for architecture $arch with $("$toolkit/bin/nvcc" --version | grep -o 'release [0-9.]*')"
export CUDA_PATH=$toolkit CUDA_HOME=$toolkit NVCC=$toolkit/bin/nvcc CUDA_COMPUTE_CAP=$arch PATH=$toolkit/bin:$PATH
scripts/bundle.sh release dynamic-backends,candle-cuda target/candle-cuda
for name in cudart cublas cublasLt curand; do
  library=$(compgen -G "$toolkit/lib64/lib$name.so.*" | grep -E 'so\.[0-9.]+$' | sort | head -n 1)
  cp -Llf "$library" target/candle-cuda/release/lib/ 2>/dev/null || cp -Lf "$library" target/candle-cuda/release/lib/
done
echo "cuda: target/candle-cuda/release/baton and target/candle-cuda/release/lib are ready"
