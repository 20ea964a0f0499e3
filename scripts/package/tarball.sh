#!/usr/bin/env bash
# Packs OUT/tree with packaging/install.sh: OUT/baton-VERSION-SYSTEM.tar.gz.
#   scripts/package/tarball.sh OUT VERSION SYSTEM
set -euo pipefail
out=$(cd "$1" && pwd) name=baton-$2-$3
cd "$(dirname "$0")/../.."
rm -rf "$out/$name"
mkdir "$out/$name"
cp -R "$out/tree/." "$out/$name/"
install -m 755 packaging/install.sh "$out/$name/install.sh"
cp LICENSE "$out/$name/"
# Owned by nobody in particular, wherever it was packed.
owner=()
tar --version 2>/dev/null | grep -q GNU && owner=(--owner=0 --group=0 --numeric-owner)
# A Mac's tar would add a file of attributes to each.
export COPYFILE_DISABLE=1
tar -C "$out" ${owner[@]+"${owner[@]}"} -cf - "$name" | gzip -9n > "$out/$name.tar.gz"
rm -rf "${out:?}/$name"
echo "$out/$name.tar.gz"
