#!/usr/bin/env bash
# Builds llama.cpp's llama-server, which has no wheel, from llama-cpp-python's source under target/upstreams: about 10 minutes
# on two cores the first time. `perplexity` also builds llama-perplexity.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=tests/clients/llama_cpp
built=$PWD/target/upstreams
venv=target/clients-llama-cpp

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
if ! cmp -s "$tests/source.txt" "$built/source.txt"; then
  echo "build-llama-server: building llama-server in target/upstreams; this takes a while" >&2
  rm -rf "$built" && mkdir -p "$built/source"
  # pip runs the package's build system to read its name and version; this compiles nothing.
  "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --require-hashes -r "$tests/source.txt" -d "$built"
  tar -xzf "$built"/llama_cpp_python-*.tar.gz -C "$built/source" --strip-components 1
  rm "$built"/llama_cpp_python-*.tar.gz
  cp "$tests/source.txt" "$built/source.txt"
fi

# The web pages would be downloaded. Without its own number, the repository around it would be asked for one.
options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_TESTS=OFF
  -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT=unknown)
if [ ! -f "$built/build/done" ]; then
  CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja} cmake -S "$built/source/vendor/llama.cpp" -B "$built/build" "${options[@]}" >&2
  cmake --build "$built/build" --target llama-server llama mtmd >&2
  touch "$built/build/done"
fi
if [ "${1:-}" = perplexity ]; then cmake --build "$built/build" --target llama-perplexity >&2; fi
