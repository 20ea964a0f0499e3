#!/usr/bin/env bash
# KV between two real backends: builds with Vulkan, and hands a short prompt from the processor to Vulkan and back. Without
# a GPU, Mesa's software driver stands in, which is slow and right.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh vulkan
export CXXFLAGS="${CXXFLAGS:-} -include $PWD/scripts/vulkan/layer_settings.hpp"
# Without it llama.cpp passes over a software device and computes on the processor.
export GGML_VK_VISIBLE_DEVICES=${GGML_VK_VISIBLE_DEVICES:-0}
cargo build --release --locked --features vulkan --target-dir target/vulkan
target/vulkan/release/baton doctor --tokens 64 --new-tokens 8 --threads 1
cargo test --release --locked --features vulkan --target-dir target/vulkan --test real_model -- --nocapture vulkan
