#!/usr/bin/env bash
# Makes target/arm/root: a newer Debian with Rust, a cross compiler for aarch64 and qemu-user. The machine itself gets
# debootstrap and nothing else. Does nothing if the folder is complete.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD/target/arm/root
# The first suite whose rustc is new enough (1.89): trixie has 1.85.
suite=${ARM_SUITE:-forky}
packages="bash curl ca-certificates ccache cmake make ninja-build libclang-dev rustc cargo libstd-rust-dev:arm64 gcc g++
  gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libgomp1:arm64 libstdc++6:arm64 qemu-user"

[ -e "$root/.complete" ] && exit
scripts/setup.sh arm
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
# The mirror that this machine itself uses.
mirror=$(apt-get indextargets --format '$(SITE) $(ORIGIN) $(LABEL)' 'Created-By: Packages' \
  | sed -n 's/ Debian Debian$//p' | head -n 1)
[ -n "$mirror" ] || { echo "arm: apt knows no Debian mirror, or has no lists yet (apt-get update)" >&2; exit 1; }

echo "arm: Debian $suite and its compilers go to target/arm/root (3.4 GB)"
$sudo rm -rf --one-file-system "$root"
mkdir -p "$root" target/arm/home
script=/usr/share/debootstrap/scripts/$suite
# An older debootstrap does not know newer suites, which need nothing special.
[ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
$sudo debootstrap --variant=minbase --components=main "$suite" "$root" "$mirror" "$script" \
  > target/arm/debootstrap.log 2>&1 || { tail -n 20 target/arm/debootstrap.log >&2; exit 1; }

# How this machine reaches its mirror and checks it, and its names of hosts.
apt-config dump | grep '^Acquire::' | $sudo tee "$root/etc/apt/apt.conf.d/90machine" > /dev/null
$sudo cp /etc/resolv.conf /etc/hosts "$root/etc/"
$sudo dpkg --root="$root" --add-architecture arm64
$sudo chroot "$root" apt-get update -qq
# shellcheck disable=SC2086  # a list of names
$sudo env DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y -qq --no-install-recommends $packages \
  > target/arm/packages.log 2>&1 || { tail -n 20 target/arm/packages.log >&2; exit 1; }
# Certificates that this machine trusts in addition, as behind a company's proxy.
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || $sudo cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
$sudo mkdir -p "$root/baton" "$root/models"
$sudo touch "$root/.complete"
