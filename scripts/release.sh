#!/usr/bin/env bash
# The steps of .github/workflows/release.yml, which run on any machine.
#   scripts/release.sh check           TAG, if there is one, is the version of Cargo.toml, and CHANGELOG.md names it. Before hours of building
#   scripts/release.sh build KIND      the program and its libraries, in FOLDER/bundle
#   scripts/release.sh answers KIND    the program starts and has the version of TAG, if there is one
#   scripts/release.sh pack KIND       its packages, in FOLDER/dist
#   scripts/release.sh install KIND    the tarball is installed in a folder and removed
#   scripts/release.sh describe URL    the formula, the list of what is inside, and FOLDER/notes.md; once all packages are in FOLDER/dist
# KIND is linux-…-cpu, linux-…-cuda or macos-…-metal, and is built on such a machine. URL: where the packages will be downloaded from.
#   FOLDER    default: the repository's
#   TAG       such as v1.2.3
set -euo pipefail
step=$1
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(cd "${FOLDER:-$here}" && pwd)
cd "$here"
bundle=$folder/bundle dist=$folder/dist

check() {
  [ -n "${TAG:-}" ] || return 0
  local version
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
  [ "v$version" = "$TAG" ] || { echo "release: Cargo.toml has version $version, and the tag is $TAG" >&2; exit 1; }
  scripts/package/notes.py CHANGELOG.md "$version" > /dev/null
}

build() { # KIND
  local from
  case $1 in
    linux-*-cuda) PROFILE=dist scripts/cuda/build.sh; from=target/cuda/dist ;;
    linux-*-cpu) make portable; from=target/portable/dist ;;
    macos-*-metal) RUSTFLAGS= make dist; from=target/dist ;;
    *) echo "release: there is no kind $1" >&2; exit 2 ;;
  esac
  rm -rf "$bundle"
  mkdir -p "$bundle"
  for part in baton lib nvidia-wheels.txt; do
    [ ! -e "$from/$part" ] || cp -R "$from/$part" "$bundle/"
  done
}

answers() {
  "$bundle/baton" check-config configs/single-machine.toml
  local version
  version=$("$bundle/baton" --version | cut -d' ' -f2)
  [ -z "${TAG:-}" ] || [ "v$version" = "$TAG" ] || { echo "release: the program has version $version, and the tag is $TAG" >&2; exit 1; }
}

pack() { # KIND
  case $1 in
    # The tarball has cuBLAS' 640 MB, and the wheel depends on NVIDIA's instead. A .deb would have the name of the other one.
    *-cuda) export VARIANT=cuda KINDS="tarball wheel" MAX_BYTES=2000000000 CARGO_FEATURE_FLAGS="--features cuda" ;;
  esac
  scripts/package/all.sh "$bundle" "$dist"
}

install_and_remove() {
  local place
  place=$(mktemp -d)
  # shellcheck disable=SC2064  # the place of now
  trap "rm -rf '$place'" EXIT
  find "$dist" -maxdepth 1 -name 'baton-*.tar.gz' ! -name '*-symbols.tar.gz' -exec tar -C "$place" -xf {} \;
  "$place"/baton-*/install.sh --prefix "$place/home"
  "$place/home/bin/baton" --version
  "$place"/baton-*/install.sh --prefix "$place/home" --remove
  [ ! -e "$place/home/bin/baton" ] || { echo "release: install.sh --remove leaves the program" >&2; exit 1; }
}

describe() { # URL
  local version=${TAG#v}
  scripts/package/formula.sh "$dist" "$version" "$1"
  scripts/third-party-notices.py --sbom > "$dist/baton-$version.cdx.json"
  scripts/package/notes.py CHANGELOG.md "$version" > "$folder/notes.md"
}

case $step in
  build | pack) "$step" "$2" ;;
  check) check ;;
  answers) answers ;;
  install) install_and_remove ;;
  describe) describe "$2" ;;
  *) echo "release: there is no step $step" >&2; exit 2 ;;
esac
