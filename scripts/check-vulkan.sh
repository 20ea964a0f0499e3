#!/usr/bin/env bash
# Builds with Vulkan, and hands the KV of a short prompt from the processor to Vulkan and back. Without a GPU this uses
# Mesa's software driver, which is slow and correct.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh vulkan
export CXXFLAGS="${CXXFLAGS:-} -include $PWD/scripts/vulkan/layer_settings.hpp"
# Otherwise llama.cpp ignores a software device and computes on the processor.
export GGML_VK_VISIBLE_DEVICES=${GGML_VK_VISIBLE_DEVICES:-0}
cargo build --release --locked --features vulkan --target-dir target/vulkan
target/vulkan/release/baton doctor --tokens 64 --new-tokens 8 --threads 1
cargo test --release --locked --features vulkan --target-dir target/vulkan --test real_model -- --nocapture vulkan
