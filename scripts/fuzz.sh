#!/usr/bin/env bash
# Runs every fuzzer of the fuzz preset for FUZZ_SECONDS (default 10) over its committed corpus,
# tests/fuzz/corpus/NAME/ for NAME_fuzz. New inputs and crashes stay in the build folder.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/asan
seconds="${FUZZ_SECONDS:-10}"
passed=0
failed=0
for fuzzer in "$build"/fuzzers/*_fuzz; do
  [[ -x "$fuzzer" ]] || continue
  name="$(basename "$fuzzer" _fuzz)"
  work="$build/fuzz-work/$name"
  mkdir -p "$work"
  corpus=("$work")
  [[ -d "tests/fuzz/corpus/$name" ]] && corpus+=("tests/fuzz/corpus/$name")
  echo "fuzz: $name, $seconds s"
  if "$fuzzer" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$work.crash-" "${corpus[@]}" >"$work.log" 2>&1; then
    grep -E 'number_of_executed_units|new_units_added' "$work.log" || true
    passed=$((passed + 1))
  else
    tail -n 60 "$work.log"
    failed=$((failed + 1))
  fi
done
echo "fuzz: $passed passed, $failed failed"
((failed == 0))
