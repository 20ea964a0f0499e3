#!/usr/bin/env bash
# Packs the program of the Arm build, unpacks each package as its installer does, and runs what it has: the version, a configuration's
# check, and a reply of the simulator. Inside scripts/arm/inside.sh.
#   scripts/arm/packages.sh PROGRAM OUT
set -euo pipefail
cd "$(dirname "$0")/../.."
program=$1 out=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"; [ -z "${server:-}" ] || kill "$server" 2>/dev/null || true' EXIT
# With `lib` the packages bring OpenMP's threads.
mkdir -p "$folder/build/lib"
cp "$program" "$folder/build/baton"
CC=aarch64-linux-gnu-gcc OBJCOPY=aarch64-linux-gnu-objcopy STRIP=aarch64-linux-gnu-strip \
  scripts/package/all.sh "$folder/build" "$out"

one() { # PATTERN
  local found
  mapfile -t found < <(compgen -G "$out/$1")
  [ ${#found[@]} = 1 ] || { echo "arm: not one $1: ${found[*]}" >&2; exit 1; }
  echo "${found[0]}"
}
# This system's Python and dpkg are not Arm's.
tarball=$(one 'baton-*-linux-aarch64.tar.gz') deb=$(one 'baton-serve_*_arm64.deb') wheel=$(one 'baton_serve-*_aarch64.whl')
mkdir "$folder/tarball"
tar -C "$folder/tarball" -xf "$tarball"
"$folder"/tarball/baton-*/install.sh --prefix "$folder/home"
dpkg-deb --extract "$deb" "$folder/deb"
python3 - "$wheel" "$folder/wheel" <<'PYTHON'
import pathlib, sys, zipfile

prefix = pathlib.Path(sys.argv[2])
with zipfile.ZipFile(sys.argv[1]) as archive:
    for entry in archive.infolist():
        head, _, rest = entry.filename.partition(".data/")
        kind, _, within = rest.partition("/")
        target = {"scripts": prefix / "bin", "data": prefix}.get(kind)
        if target:
            path = target / within
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(entry))
            path.chmod(entry.external_attr >> 16 & 0o777)
PYTHON

for prefix in "$folder/home" "$folder/deb/usr" "$folder/wheel"; do
  baton=$prefix/bin/baton
  [ "$(scripts/package/elf.py arch "$baton")" = arm64 ]
  "$baton" --version
  "$baton" check-config configs/single-machine.toml
  "$baton" serve --engine sim --listen 127.0.0.1:0 > "$folder/log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    grep -q 'Baton serves' "$folder/log" && break
    kill -0 "$server" || { cat "$folder/log" >&2; exit 1; }
    sleep 0.1
  done
  base=$(grep -o 'http://[0-9.:]*' "$folder/log" | head -n 1)
  curl -fsS --max-time 60 "$base/v1/chat/completions" -d '{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":8}' \
    | grep -q '"finish_reason"' || { echo "arm: the packed program does not answer" >&2; cat "$folder/log" >&2; exit 1; }
  kill "$server"
  wait "$server" || true
  server=
done
echo "arm: packed, and each package's program answered"
