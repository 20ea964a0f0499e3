#!/usr/bin/env bash
# Baton in front of llama.cpp's llama-server and of llama-cpp-python's server. Neither has a wheel, so both are built
# from llama-cpp-python's source under target/upstreams: about 10 minutes on two cores the first time, and not part of
# CI. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export BATON=$PWD/target/release/baton
tests=tests/clients/llama_cpp
built=$PWD/target/upstreams
venv=target/clients-llama-cpp

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
if ! cmp -s "$tests/requirements.txt" "$venv/installed.txt"; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$tests/requirements.txt"
  cp "$tests/requirements.txt" "$venv/installed.txt"
fi

if ! cmp -s "$tests/source.txt" "$built/source.txt"; then
  echo "check-upstreams: building llama-server in target/upstreams; this takes a while"
  rm -rf "$built" && mkdir -p "$built/source"
  # pip runs the package's build system to read its name and version; this compiles nothing.
  "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
    --require-hashes -r "$tests/source.txt" -d "$built"
  tar -xzf "$built"/llama_cpp_python-*.tar.gz -C "$built/source" --strip-components 1
  rm "$built"/llama_cpp_python-*.tar.gz
  # The web pages would be downloaded. Without its own number, the repository around it would be asked for one.
  CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja} cmake -S "$built/source/vendor/llama.cpp" -B "$built/build" \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT=unknown >"$built/configured.txt"
  cmake --build "$built/build" --target llama-server llama mtmd
  cp "$tests/source.txt" "$built/source.txt"
fi

# llama-cpp-python runs from its source folder with the libraries of llama-server.
export BATON_UPSTREAMS=$built
"$venv/bin/python" -m pytest -q -rs -p no:cacheprovider -p no:warnings -c tests/clients/pytest.ini "$tests" "$@"
