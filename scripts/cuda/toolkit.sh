#!/usr/bin/env bash
# Prints the folder of a CUDA toolkit: the installed one, or one under target/cuda-toolkit that is put together from the
# wheels of scripts/cuda/requirements.txt (560 MB to download, 1.1 GB unpacked).
set -euo pipefail
cd "$(dirname "$0")/../.."
installed=${CUDA_PATH:-/usr/local/cuda}
if nvcc=$(command -v "$installed/bin/nvcc" || command -v nvcc); then
  dirname "$(dirname "$(readlink -f "$nvcc")")"
  exit 0
fi

folder=$PWD/target/cuda-toolkit
toolkit=$folder/wheels/nvidia/cu13
if ! cmp -s scripts/cuda/requirements.txt "$folder/requirements.txt"; then
  echo "cuda: no nvcc was found; its wheels go to target/cuda-toolkit" >&2
  rm -rf "$folder" && mkdir -p "$folder"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r scripts/cuda/requirements.txt --target "$folder/wheels" >&2
  # What a toolkit has and the wheels lack: links without a version, which linkers look for, and the folder's usual name.
  ln -s lib "$toolkit/lib64"
  for library in "$toolkit"/lib/*.so.*; do ln -s "$(basename "$library")" "${library%.so.*}.so"; done
  # Only a driver brings libcuda.so.1. Linkers are content with a library of this name that defines the functions in use.
  mkdir -p "$toolkit/lib/stubs"
  cc -shared -Wl,-soname,libcuda.so.1 -o "$toolkit/lib/stubs/libcuda.so" scripts/cuda/driver-stub.c
  cp scripts/cuda/requirements.txt "$folder/requirements.txt"
fi
echo "$toolkit"
