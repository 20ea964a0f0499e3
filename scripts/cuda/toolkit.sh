#!/usr/bin/env bash
# Prints the folder of a CUDA toolkit that knows the given architectures: the installed one, or one under target/ that is put
# together from the wheels of scripts/cuda/NAME.txt (560 MB to download, 1.1 GB unpacked).
#   scripts/cuda/toolkit.sh NAME ARCHITECTURE…
# NAME is `llama` or `candle`: the two need different libraries.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1
shift
libraries="cudart cublas cublasLt"
[ "$name" = llama ] || libraries="$libraries curand nvrtc"
# Returns success if a toolkit is complete: a distribution's may be old, or have its libraries elsewhere.
serves() { # FOLDER ARCHITECTURE...
  local folder=$1 known
  shift
  for library in $libraries; do compgen -G "$folder/lib64/lib$library.so.[0-9]*" >/dev/null || return; done
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
  echo "cuda: $found does not serve: it must know the architectures $*, and have $libraries in lib64" >&2
done

requirements=scripts/cuda/$name.txt folder=$PWD/target/cuda-toolkit-$name
toolkit=$folder/wheels/nvidia/cu13
if ! cmp -s $requirements "$folder/requirements.txt"; then
  echo "cuda: the toolkit's wheels go to $folder" >&2
  rm -rf "$folder" && mkdir -p "$folder"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    -r $requirements --target "$folder/wheels" >&2
  # The wheels lack the links without a version, which linkers look for, and the folder's usual name.
  ln -s lib "$toolkit/lib64"
  for library in "$toolkit"/lib/*.so.*; do ln -s "$(basename "$library")" "${library%.so.*}.so"; done
  # Only a driver brings libcuda.so.1. Linkers are content with a library of this name that defines the functions of its header.
  mkdir -p "$toolkit/lib/stubs"
  grep -oE '\bcu[A-Z][A-Za-z0-9_]*' "$toolkit/include/cuda.h" | sort -u | sed 's/.*/int &(void) { return 100; } /' \
    | cc -shared -fno-builtin -Wl,-soname,libcuda.so.1 -o "$toolkit/lib/stubs/libcuda.so" -x c -
  cp $requirements "$folder/requirements.txt"
fi
echo "$toolkit"
