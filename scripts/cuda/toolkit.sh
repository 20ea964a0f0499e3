#!/usr/bin/env bash
# Prints the folder of a CUDA toolkit that knows the given architectures: the installed one, or one under target/cuda-toolkit
# that is put together from the wheels of scripts/cuda/requirements.txt (560 MB to download, 1.1 GB unpacked).
#   scripts/cuda/toolkit.sh ARCHITECTURE…
set -euo pipefail
cd "$(dirname "$0")/../.."
# Returns success if a toolkit is complete: a distribution's may be old, or have its libraries elsewhere.
serves() { # FOLDER ARCHITECTURE...
  local folder=$1 known
  shift
  for library in cudart cublas cublasLt; do compgen -G "$folder/lib64/lib$library.so.[0-9]*" >/dev/null || return; done
  known=$("$folder/bin/nvcc" --list-gpu-arch) || return
  for arch in "$@"; do grep -qx "compute_${arch%[af]}" <<<"$known" || return; done
}
for nvcc in "${CUDA_PATH:-/usr/local/cuda}/bin/nvcc" "$(command -v nvcc || true)"; do
  [ -x "$nvcc" ] || continue
  found=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  if serves "$found" "$@"; then
    echo "$found"
    exit 0
  fi
  echo "cuda: $found does not serve: it must know the architectures $*, and have cuBLAS in lib64" >&2
done

folder=$PWD/target/cuda-toolkit
toolkit=$folder/wheels/nvidia/cu13
if ! cmp -s scripts/cuda/requirements.txt "$folder/requirements.txt"; then
  echo "cuda: the toolkit's wheels go to target/cuda-toolkit" >&2
  rm -rf "$folder" && mkdir -p "$folder"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r scripts/cuda/requirements.txt --target "$folder/wheels" >&2
  # The wheels lack the links without a version, which linkers look for, and the folder's usual name.
  ln -s lib "$toolkit/lib64"
  for library in "$toolkit"/lib/*.so.*; do ln -s "$(basename "$library")" "${library%.so.*}.so"; done
  # Only a driver brings libcuda.so.1. Linkers are content with a library of this name that defines the functions in use.
  mkdir -p "$toolkit/lib/stubs"
  cc -shared -Wl,-soname,libcuda.so.1 -o "$toolkit/lib/stubs/libcuda.so" scripts/cuda/driver-stub.c
  cp scripts/cuda/requirements.txt "$folder/requirements.txt"
fi
echo "$toolkit"
