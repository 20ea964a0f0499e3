#!/usr/bin/env bash
# Makes every package of this system from a ready program, with their checksums and sizes.
#   scripts/package/all.sh FOLDER OUT
# FOLDER: see scripts/package/stage.sh. The packages lie in OUT.
#   KINDS       a list of: tarball deb wheel (default: all that this system has)
#   VARIANT     cuda: the tarball and the wheel get names of their own, and the wheel depends on NVIDIA's wheels
#   MAX_BYTES   what a package may have (default: 40 MB)
set -euo pipefail
from=$1 out=$2
here=$(dirname "$0")
"$here/stage.sh" "$from" "$out"
version=$("$out/tree/bin/baton" --version | cut -d' ' -f2)
# The program's processor, not this machine's.
if [ "$(uname)" = Linux ]; then system=linux-$("$here/elf.py" machine "$out/tree/bin/baton"); else system=macos-$(uname -m); fi
system+=${VARIANT:+-$VARIANT}
rm -f "$out"/baton-*.tar.gz "$out"/baton-serve_*.deb "$out"/baton_serve*.whl
made=()
for kind in ${KINDS:-tarball deb wheel}; do
  case $kind in
    tarball) made+=("$("$here/tarball.sh" "$out" "$version" "$system")") ;;
    deb) if [ "$(uname)" = Linux ] && command -v dpkg-deb > /dev/null; then made+=("$("$here/deb.sh" "$out" "$version")"); fi ;;
    wheel) made+=("$("$here/wheel.py" "$out" "$version" ${VARIANT:+"$VARIANT"})") ;;
    *) echo "package: there is no kind $kind" >&2; exit 2 ;;
  esac
done
cd "$out"
names=("${made[@]##*/}")
# What people download.
for name in "${names[@]}"; do
  bytes=$(wc -c < "$name")
  awk -v name="$name" -v bytes="$bytes" 'BEGIN { printf "package: %-52s %6.1f MB\n", name, bytes / 1e6 }'
  [ "$bytes" -le "${MAX_BYTES:-40000000}" ] || { echo "package: $name is larger than ${MAX_BYTES:-40000000} bytes" >&2; exit 1; }
done
tar -czf "baton-$version-$system-symbols.tar.gz" symbols
names+=("baton-$version-$system-symbols.tar.gz")
if command -v sha256sum > /dev/null; then sha256sum "${names[@]}"; else shasum -a 256 "${names[@]}"; fi > "SHA256SUMS-$system"
