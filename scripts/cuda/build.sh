#!/usr/bin/env bash
# Builds Baton with CUDA: target/cuda/release has the program and its folder `lib`, to be copied together.
#   ARCHS     the cards, such as "121 90" (default: the cards of this machine, else a DGX Spark, 121, and a Hopper, 90)
#   PROFILE   cargo's profile (default: release)
# An hour on two cores for both. A second run goes on where the first one was stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
profile=${PROFILE:-release}
scripts/setup.sh build

# Without a driver nvidia-smi prints a sentence, on its standard output.
cards() {
  { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } \
    | sed -n 's/^\([0-9]\{1,2\}\)\.\([0-9]\)$/\1\2/p' | sort -u | xargs
}
archs=${ARCHS:-$(cards)}
archs=${archs:-121 90}
for arch in $archs; do
  [[ $arch =~ ^[0-9]{2,3}[af]?$ ]] || { echo "cuda: ARCHS=\"$archs\": $arch is no architecture; 121 is one" >&2; exit 2; }
done
# shellcheck disable=SC2086  # a list of architectures
toolkit=$(scripts/cuda/toolkit.sh llama $archs)
echo "cuda: building for architectures $archs with $("$toolkit/bin/nvcc" --version | grep -o 'release [0-9.]*')"

export CUDA_PATH=$toolkit CUDACXX=$toolkit/bin/nvcc
export CMAKE_CUDA_ARCHITECTURES=${archs// /;}
if command -v ccache >/dev/null; then export CMAKE_CUDA_COMPILER_LAUNCHER=ccache; fi
# Cargo does not see these settings change.
settings="$toolkit $archs"
if [ "$(cat target/cuda/settings 2>/dev/null || true)" != "$settings" ]; then
  rm -rf target/cuda/*/build/llama-cpp-sys-2-*
  mkdir -p target/cuda && echo "$settings" > target/cuda/settings
fi
scripts/bundle.sh "$profile" cuda target/cuda
for name in cudart cublas cublasLt; do
  # By the name that the loader asks for: libcudart.so.13, and not libcudart.so.13.5.37.
  library=$(compgen -G "$toolkit/lib64/lib$name.so.*" | grep -E 'so\.[0-9]+$' | head -n 1)
  # A link costs no space. The other file system of an installed toolkit needs a copy.
  cp -Llf "$library" target/cuda/$profile/lib/ 2>/dev/null || cp -Lf "$library" target/cuda/$profile/lib/
done
# What a wheel depends on instead of carrying it: nothing older than what was compiled against.
defined() { sed -n "s/^#define $2  *\([0-9]*\).*/\1/p" "$toolkit/include/$1" | head -n 1; }
runtime=$(defined cuda_runtime_api.h CUDART_VERSION)
major=$((runtime / 1000))
cat > "target/cuda/$profile/nvidia-wheels.txt" <<WHEELS
nvidia-cuda-runtime>=$major.$((runtime % 1000 / 10)),<$((major + 1))
nvidia-cublas>=$(defined cublas_api.h CUBLAS_VER_MAJOR).$(defined cublas_api.h CUBLAS_VER_MINOR),<$((major + 1))
WHEELS
# They are NVIDIA's.
licence=$(find "$toolkit" "$toolkit/../.." -maxdepth 3 \( -iname 'eula.txt' -o -ipath '*cublas*/licen*.txt' \) | head -n 1)
[ -n "$licence" ] || { echo "cuda: the toolkit's licence was not found in $toolkit" >&2; exit 1; }
cp "$licence" "target/cuda/$profile/lib/NVIDIA-LICENCE.txt"
echo "cuda: target/cuda/$profile/baton and target/cuda/$profile/lib are ready ($(du -shL target/cuda/$profile/lib | cut -f1))"
