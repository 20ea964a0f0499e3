#!/usr/bin/env bash
# Makes the Homebrew formula of a release from packaging/homebrew/baton-serve.rb, with the checksums of the tarballs in FOLDER.
#   scripts/package/formula.sh FOLDER VERSION URL      URL: the folder that the tarballs are downloaded from
set -euo pipefail
folder=$1 version=$2 url=$3
sum() { if command -v sha256sum > /dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d' ' -f1; }
formula=$(sed -e "s,@VERSION@,$version,g" -e "s,@URL@,$url,g" "$(dirname "$0")/../../packaging/homebrew/baton-serve.rb")
for system in macos-arm64 linux-x86_64 linux-aarch64; do
  tarball=$folder/baton-$version-$system.tar.gz
  [ -e "$tarball" ] || { echo "package: the formula needs $tarball" >&2; exit 1; }
  formula=${formula//@SUM_$system@/$(sum "$tarball")}
done
echo "$formula" > "$folder/baton-serve.rb"
echo "$folder/baton-serve.rb"
