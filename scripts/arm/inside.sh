#!/usr/bin/env bash
# Runs a command inside target/arm/root, where this folder is /baton and MODELS is /models. Cargo compiles for aarch64, and
# the kernel starts aarch64 programs with qemu-user. Nothing of this is seen outside, and all of it ends with the command.
#
# Usage: MODELS=FOLDER scripts/arm/inside.sh COMMAND...
set -euo pipefail
baton=$(cd "$(dirname "$0")/../.." && pwd)
environment=(
  HOME=/baton/target/arm/home
  PATH=/usr/bin:/bin:/usr/sbin:/sbin
  CARGO_HOME=/baton/target/arm/cargo
  CARGO_TARGET_DIR=/baton/target/arm/build
  CARGO_INCREMENTAL=0
  # Not for the processor of this machine, as .cargo/config.toml has it. A packed program finds OpenMP's threads there.
  'RUSTFLAGS=-C link-arg=-Wl,-rpath,$ORIGIN/../lib/baton'
  # Quick to compile. llama.cpp, which computes, is optimised as always.
  CARGO_PROFILE_RELEASE_OPT_LEVEL=1
  CARGO_PROFILE_RELEASE_DEBUG=0
  CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
  "BINDGEN_EXTRA_CLANG_ARGS_aarch64_unknown_linux_gnu=--sysroot=/usr/aarch64-linux-gnu -I/usr/aarch64-linux-gnu/include"
  CCACHE_DIR=/baton/target/arm/ccache
  CMAKE_GENERATOR=Ninja
  CMAKE_C_COMPILER_LAUNCHER=ccache
  CMAKE_CXX_COMPILER_LAUNCHER=ccache
  # Every Spark has these features of Arm processors.
  CMAKE_PROJECT_INCLUDE=/baton/scripts/arm/cpu.cmake
  JEMALLOC_SYS_WITH_LG_PAGE=16
  # Threads that spin while they wait starve the emulator's others.
  GOMP_SPINCOUNT=5000
)
for name in http_proxy https_proxy no_proxy BATON_CLUSTER_KEY; do
  [ -z "${!name:-}" ] || environment+=("$name=${!name}")
done

# A user namespace has its own table of interpreters, from Linux 6.7. On an older kernel, the machine's table must have
# qemu-aarch64 with the flag F (Debian's package qemu-user-static enters it).
# shellcheck disable=SC2016  # expanded by the inner shells
register='[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || {
  mount -t binfmt_misc none /proc/sys/fs/binfmt_misc \
    && cat /usr/share/qemu/binfmt.d/qemu-aarch64.conf > /proc/sys/fs/binfmt_misc/register; } \
  || { echo "arm: Linux 6.7 is needed, or the package qemu-user-static" >&2; exit 1; }
cd /baton
exec "$@"'
# shellcheck disable=SC2016
exec unshare --user --map-root-user --mount sh -euc '
root=$1 baton=$2 models=$3 register=$4
shift 4
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$baton" "$root/baton"
mount --bind "$models" "$root/models"
exec chroot "$root" sh -euc "$register" sh "$@"
' sh "$baton/target/arm/root" "$baton" "${MODELS:-$baton/target/arm/home}" "$register" env -i "${environment[@]}" "$@"
