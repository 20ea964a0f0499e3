#!/usr/bin/env bash
# Makes the tree that every package carries, as it lies below a prefix such as /usr: bin, lib/baton, share.
#   scripts/package/stage.sh FOLDER OUT
# FOLDER has the program `baton`, and `lib` if it was built by scripts/bundle.sh. OUT/tree is made anew; OUT/symbols gets what is
# stripped, which a debugger finds by the program's build id. NOTICES names a ready file of notices, for
# tests; CARGO_FEATURE_FLAGS are those that the program was built with.
set -euo pipefail
from=$(cd "$1" && pwd) out=$2
cd "$(dirname "$0")/../.."
mkdir -p "$out"
out=$(cd "$out" && pwd)
tree=$out/tree
rm -rf "$tree" "$out/symbols"
mkdir -p "$tree/bin" "$tree/share/man/man1" "$tree/share/baton" "$tree/share/doc/baton" "$out/symbols"

install -m 755 "$from/baton" "$tree/bin/baton"
if [ -d "$from/lib" ]; then
  mkdir -p "$tree/lib/baton"
  cp -L "$from"/lib/* "$tree/lib/baton/"
  # OpenMP's threads, which systems need not have. GCC's licence allows it with any program (the runtime library exception).
  if [ "$(uname)" = Linux ] && [ ! -e "$tree/lib/baton/libgomp.so.1" ]; then
    gomp=$("${CC:-cc}" -print-file-name=libgomp.so.1)
    # An unknown file is printed as it was given.
    [ "$gomp" = libgomp.so.1 ] || cp -L "$gomp" "$tree/lib/baton/libgomp.so.1"
  fi
  find "$tree/lib/baton" -type f -exec chmod 644 {} +
fi

if [ "$(uname)" = Linux ]; then
  objcopy --only-keep-debug --compress-debug-sections "$tree/bin/baton" "$out/symbols/baton.debug"
  strip --strip-all "$tree/bin/baton"
  objcopy --add-gnu-debuglink="$out/symbols/baton.debug" "$tree/bin/baton"
  [ ! -d "$tree/lib/baton" ] || find "$tree/lib/baton" -name '*.so*' -exec strip --strip-unneeded {} +
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
