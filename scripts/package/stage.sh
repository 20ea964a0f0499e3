#!/usr/bin/env bash
# Makes the tree that every package carries, as it lies below a prefix such as /usr: bin, lib/baton, share.
#   scripts/package/stage.sh FOLDER OUT
# FOLDER has the program `baton`, and `lib` if it was built by scripts/bundle.sh, and `nvidia-wheels.txt` if by
# scripts/cuda/build.sh. OUT/tree is made anew; OUT/symbols gets what is
# stripped, which a debugger finds by the program's build id. NOTICES names a ready file of notices, for
# tests; CARGO_FEATURE_FLAGS are those that the program was built with. CC, OBJCOPY and STRIP are the tools of another processor's
# program, which this system must be able to start (scripts/arm/packages.sh).
set -euo pipefail
mkdir -p "$2"
from=$(cd "$1" && pwd) out=$(cd "$2" && pwd)
cd "$(dirname "$0")/../.."
tree=$out/tree
rm -rf "$tree" "$out/symbols" "$out/nvidia-wheels.txt"
mkdir -p "$tree/bin" "$tree/share/man/man1" "$tree/share/baton" "$tree/share/doc/baton" "$out/symbols"

install -m 755 "$from/baton" "$tree/bin/baton"
if [ -d "$from/lib" ]; then
  mkdir -p "$tree/lib/baton"
  cp -RL "$from/lib/." "$tree/lib/baton/"
  # OpenMP's threads, which systems need not have. GCC's licence allows it with any program (the runtime library exception), and
  # asks for its text and the source's place.
  if [ "$(uname)" = Linux ] && [ ! -e "$tree/lib/baton/libgomp.so.1" ]; then
    gomp=$("${CC:-cc}" -print-file-name=libgomp.so.1)
    # An unknown file is printed as it was given.
    if [ "$gomp" != libgomp.so.1 ]; then
      cp -L "$gomp" "$tree/lib/baton/libgomp.so.1"
      mapfile -t licences < <(compgen -G '/usr/share/doc/libgomp1*/copyright' | head -n 1; compgen -G '/usr/share/common-licenses/GPL-3' \
        || compgen -G '/usr/share/licenses/libgomp/COPYING*')
      [ ${#licences[@]} -ge 2 ] || { echo "package: the licence of $gomp was not found in /usr/share" >&2; exit 1; }
      {
        echo "lib/baton/libgomp.so.1 is that of GCC $("${CC:-cc}" -dumpfullversion), stripped. Source: https://gcc.gnu.org/releases.html"
        cat "${licences[@]}"
      } > "$tree/share/doc/baton/LICENSE-libgomp"
    fi
  fi
  find "$tree/lib/baton" -type f -exec chmod 644 {} +
fi
[ ! -e "$from/nvidia-wheels.txt" ] || cp "$from/nvidia-wheels.txt" "$out/"

if [ "$(uname)" = Linux ]; then
  "${OBJCOPY:-objcopy}" --only-keep-debug --compress-debug-sections "$tree/bin/baton" "$out/symbols/baton.debug"
  "${STRIP:-strip}" --strip-all "$tree/bin/baton"
  "${OBJCOPY:-objcopy}" --add-gnu-debuglink="$out/symbols/baton.debug" "$tree/bin/baton"
  [ ! -d "$tree/lib/baton" ] || find "$tree/lib/baton" -name '*.so*' ! -name 'libcu*' -exec "${STRIP:-strip}" --strip-unneeded {} +
else
  dsymutil -o "$out/symbols/baton.dSYM" "$tree/bin/baton"
  strip -x "$tree/bin/baton"
  # Stripping voids the signature, without which Apple silicon starts nothing.
  codesign --force --sign - "$tree/bin/baton"
fi

baton=$tree/bin/baton
completion() { # SHELL FILE
  mkdir -p "$tree/share/$(dirname "$2")"
  "$baton" completions "$1" > "$tree/share/$2"
}
completion bash bash-completion/completions/baton
completion zsh zsh/site-functions/_baton
completion fish fish/vendor_completions.d/baton.fish
"$baton" man "$tree/share/man/man1"
find "$tree/share/man/man1" -name '*.1' -exec gzip -9n {} +

cp LICENSE README.md CHANGELOG.md docs/operations.md docs/install.md "$tree/share/doc/baton/"
if [ -n "${NOTICES:-}" ]; then
  cp "$NOTICES" "$tree/share/doc/baton/THIRD-PARTY-NOTICES"
else
  # shellcheck disable=SC2086  # a list of flags
  scripts/third-party-notices.py ${CARGO_FEATURE_FLAGS:-} > "$tree/share/doc/baton/THIRD-PARTY-NOTICES"
fi
cp -R configs packaging/systemd packaging/launchd "$tree/share/baton/"
