#!/usr/bin/env bash
# Makes a bare Debian in a folder, for programs that need another system than this one. This machine itself gets debootstrap.
#   scripts/debian-root.sh SUITE FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1 root=$2
scripts/setup.sh debian
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
# The mirror that this machine itself uses.
mirror=$(apt-get indextargets --format '$(SITE) $(ORIGIN) $(LABEL)' 'Created-By: Packages' \
  | sed -n 's/ Debian Debian$//p' | head -n 1)
[ -n "$mirror" ] || { echo "debian: apt knows no Debian mirror, or has no lists yet (apt-get update)" >&2; exit 1; }
# Only what is empty, or an earlier root. An interrupted debootstrap leaves its own folder.
if [ -n "$(ls -A "$root" 2>/dev/null)" ] && [ ! -e "$root/etc/debian_version" ] && [ ! -e "$root/debootstrap" ]; then
  echo "debian: $root has other files" >&2
  exit 1
fi
$sudo rm -rf --one-file-system "$root"
mkdir -p "$(dirname "$root")"
script=/usr/share/debootstrap/scripts/$suite
# An older debootstrap does not know newer suites, which need nothing special.
[ -e "$script" ] || script=/usr/share/debootstrap/scripts/sid
log=$root.log
$sudo debootstrap --variant=minbase --components=main "$suite" "$root" "$mirror" "$script" \
  > "$log" 2>&1 || { tail -n 20 "$log" >&2; exit 1; }

# How this machine reaches its mirror and checks it, its names of hosts, and the certificates that it trusts in addition, as behind
# a company's proxy: the package ca-certificates adds them to its own.
apt-config dump | grep '^Acquire::' | $sudo tee "$root/etc/apt/apt.conf.d/90machine" > /dev/null
$sudo cp /etc/resolv.conf /etc/hosts "$root/etc/"
if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
  $sudo mkdir -p "$root/etc/ssl/certs"
  $sudo cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
fi
if [ -d /usr/local/share/ca-certificates ]; then
  $sudo mkdir -p "$root/usr/local/share"
  $sudo cp -R /usr/local/share/ca-certificates "$root/usr/local/share/"
fi
$sudo chroot "$root" apt-get update -qq
