#!/usr/bin/env bash
# Checks that proxy/page/dist, which is committed and embedded in the binary, is what its sources build.
# `check-page.sh write` builds it anew.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)' 2>/dev/null \
  || ! command -v npm >/dev/null; then
  echo "check-page: SKIPPED: the page's build needs npm and Node 20.19 or newer" >&2
  [ -z "${CI:-}" ] || exit 1
  exit 0
fi

# Packages are searched from a module's own folder, so the sources are built in a copy beside them.
build=$PWD/target/page
mkdir -p "$build"
if ! cmp -s proxy/page/package-lock.json "$build/installed.json"; then
  cp proxy/page/package.json proxy/page/package-lock.json "$build"
  npm ci --prefix "$build" --silent --no-audit --no-fund --ignore-scripts
  cp proxy/page/package-lock.json "$build/installed.json"
fi
rm -rf "$build/src" "$build/dist"
cp -R proxy/page/src proxy/page/index.html proxy/page/tsconfig.json proxy/page/vite.config.js "$build"
(cd "$build" && npm run --silent check && npm run --silent build -- --logLevel warn)

if [ "${1:-}" = write ]; then
  rm -rf proxy/page/dist
  cp -R "$build/dist" proxy/page/dist
elif ! diff -r "$build/dist" proxy/page/dist >/dev/null; then
  echo "check-page: proxy/page/dist is not what proxy/page/src builds. Run scripts/check-page.sh write, and commit it." >&2
  exit 1
fi
