#!/usr/bin/env bash
# Fuzzes every target of tests/fuzz with libFuzzer, guided by the coverage of Baton's own crates. Works on stable Rust and
# needs no more than a build does: libFuzzer's sources come with a crate.
#
# FUZZ_SECONDS (600): time for all targets together. FUZZ_RUNS: inputs for each, instead of a time.
# FUZZ_TARGETS: names of targets; all by default. FUZZ_PAGE: a page to write the figures to.
set -euo pipefail
cd "$(dirname "$0")/.."
RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/with-coverage.sh \
  cargo build --release --locked --package baton-fuzz --features libfuzzer --bin fuzz
all=$(sed -n 's/^    FuzzTarget { name: "\([a-z_]*\)".*/\1/p' tests/fuzz/src/lib.rs)
read -ra targets <<<"${FUZZ_TARGETS:-${all//$'\n'/ }}"
if [ -n "${FUZZ_RUNS:-}" ]; then
  limit=(-runs="$FUZZ_RUNS")
else
  limit=(-max_total_time=$(((${FUZZ_SECONDS:-600} + ${#targets[@]} - 1) / ${#targets[@]})))
fi
# Found inputs stay here between runs, so that the next run starts from them.
work=target/fuzz
table=$'| target | inputs | seconds | code points reached | inputs kept |\n|---|---|---|---|---|'
status=0
for target in "${targets[@]}"; do
  mkdir -p "$work/$target" "$work/seeds/$target" "tests/fuzz/corpus/$target"
  log=$work/$target.log
  began=$SECONDS
  # The limits on time and memory of tests/fuzz/src/limits.rs are stricter; these catch what never returns.
  if ! BATON_FUZZ_TARGET=$target BATON_FUZZ_SEEDS=$work/seeds/$target target/release/fuzz "${limit[@]}" \
    -max_len=4096 -timeout=30 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=1 -artifact_prefix="$work/$target-" \
    "$work/$target" "$work/seeds/$target" "tests/fuzz/corpus/$target" > "$log" 2>&1; then
    echo "$target: an input breaks a promise. $log has the message, $work/$target-* the input." >&2
    grep -m 3 -E 'panicked|^==' -A 1 "$log" >&2 || true
    status=1
  fi
  n=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  coverage=$(grep -oE 'cov: [0-9]+' "$log" | tail -n 1 | cut -d ' ' -f 2 || true)
  kept=$(find "$work/$target" -type f | wc -l)
  row="| \`$target\` | ${n:-?} | $((SECONDS - began)) | ${coverage:-?} | $kept |"
  echo "$row"
  table+=$'\n'$row
done
if [ -n "${FUZZ_PAGE:-}" ] && [ "$status" = 0 ]; then
  TABLE=$table COMMIT=$(git rev-parse --short HEAD) python3 - "$FUZZ_PAGE" <<'PYTHON'
import os, pathlib, re, sys
page = pathlib.Path(sys.argv[1])
run = f"At commit {os.environ['COMMIT']}:\n\n{os.environ['TABLE']}\n"
begin, end = "<!-- written by `make fuzz`: begin -->\n", "<!-- end -->"
page.write_text(re.sub(f"({re.escape(begin)}).*?({re.escape(end)})", lambda m: f"{m[1]}\n{run}\n{m[2]}", page.read_text(), flags=re.S))
PYTHON
fi
exit $status
