#!/usr/bin/env bash
# Builds a program that runs on other processors, too: llama.cpp is made of shared libraries, one for each kind of processor,
# in the folder `lib` beside the program.
#   scripts/bundle.sh PROFILE FEATURES TARGET-DIR
# With BENCH=1 it also builds the benchmarks, baton-bench.
# With TESTS="contract:: kv_architectures::" it also builds the engines' tests with these libraries and runs those named.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=$1 features=$2 target=$3
[ "$(uname)" = Linux ] || { echo "bundle: this is for Linux; on a Mac use make dist" >&2; exit 1; }
# Not for the processor of this machine alone, as .cargo/config.toml has it.
export RUSTFLAGS=
# The libraries find each other in their own folder.
export CMAKE_INSTALL_RPATH='$ORIGIN'
# In a wheel NVIDIA's libraries are those of NVIDIA's wheels (scripts/package/wheel.py).
# shellcheck disable=SC2016  # the loader's variable
[ "$features" != cuda ] || CMAKE_INSTALL_RPATH+=':$ORIGIN/../../../nvidia/cu13/lib'
export CMAKE_PROJECT_INCLUDE=$PWD/scripts/arm/variants.cmake
messages=$target/build-messages.json
mkdir -p "$target"
packages=(--package baton --features "baton/$features")
[ -z "${BENCH:-}" ] || packages+=(--package baton-bench --features "baton-bench/$features")
cargo build --profile "$profile" --locked "${packages[@]}" --target-dir "$target" \
  --message-format json-render-diagnostics > "$messages"
python3 - "$messages" "$target/$profile/lib" <<'PYTHON'
import json, pathlib, shutil, sys

messages, folder = sys.argv[1], pathlib.Path(sys.argv[2])
built = [json.loads(line) for line in open(messages)]
out = [m["out_dir"] for m in built if m["reason"] == "build-script-executed" and "llama-cpp-sys-2" in m["package_id"]]
assert len(out) == 1, f"llama.cpp was built {len(out)} times"
out = pathlib.Path(out[0])
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
# By the names that the loader asks for: libllama.so.0, not libllama.so.
libraries = [path for path in out.glob("lib*/lib*.so.*") if path.name.split(".so.")[1].isdigit()]
# AMX ends the program (SIGILL) in virtual machines that name it and do not allow it, as was seen on one with an H200. The next
# best library runs there, too.
backends = [path for path in (out / "backends").glob("libggml-*.so") if path.name != "libggml-cpu-sapphirerapids.so"]
assert libraries and backends, f"no shared libraries in {out}"
for path in libraries + backends:
    shutil.copy2(path, folder / path.name)
PYTHON
# Test programs stand one folder deeper.
ln -sfn ../lib "$target/$profile/deps/lib"
[ -n "${TESTS:-}" ] || exit 0
# shellcheck disable=SC2086  # a list of names
cargo test --profile "$profile" --locked --workspace --features "$features" --target-dir "$target" \
  --test engines -- $TESTS
