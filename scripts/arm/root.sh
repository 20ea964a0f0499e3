#!/usr/bin/env bash
# Makes target/arm/root: a newer Debian with Rust, a cross compiler for aarch64 and qemu-user. The machine itself gets
# debootstrap and nothing else. Does nothing if the folder is complete.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD/target/arm/root
# The first suite whose rustc is new enough (1.89): trixie has 1.85.
suite=${ARM_SUITE:-forky}
packages="bash curl ca-certificates ccache cmake make ninja-build libclang-dev rustc cargo libstd-rust-dev:arm64 gcc g++
  gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libgomp1:arm64 libstdc++6:arm64 python3 qemu-user"

[ "$(cat "$root/.complete" 2>/dev/null)" = "$packages" ] && exit
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
echo "arm: Debian $suite and its compilers go to target/arm/root (3.4 GB)"
mkdir -p target/arm/home
scripts/debian-root.sh "$suite" "$root"
$sudo dpkg --root="$root" --add-architecture arm64
$sudo chroot "$root" apt-get update -qq
# shellcheck disable=SC2086  # a list of names
$sudo env DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y -qq --no-install-recommends $packages \
  > target/arm/packages.log 2>&1 || { tail -n 20 target/arm/packages.log >&2; exit 1; }
$sudo mkdir -p "$root/baton" "$root/models"
echo "$packages" | $sudo tee "$root/.complete" > /dev/null
