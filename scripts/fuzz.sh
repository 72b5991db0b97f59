#!/usr/bin/env bash
# Runs every fuzzer of the fuzz preset for FUZZ_SECONDS (default 10) over its committed corpus,
# tests/fuzz/corpus/NAME/ for NAME_fuzz. New inputs and crashes stay in the build folder.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/asan
seconds="${FUZZ_SECONDS:-10}"
passed=0
failed=0
mkdir -p "$build/fuzz-work"

# run FUZZER: what it prints is the report of that fuzzer.
run() {
  local name work corpus
  name="$(basename "$1" _fuzz)"
  work="$build/fuzz-work/$name"
  mkdir -p "$work"
  corpus=("$work")
  [[ -d "tests/fuzz/corpus/$name" ]] && corpus+=("tests/fuzz/corpus/$name")
  echo "fuzz: $name, $seconds s"
  if "$1" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$work.crash-" "${corpus[@]}" >"$work.log" 2>&1; then
    grep -E 'number_of_executed_units|new_units_added' "$work.log" || true
  else
    tail -n 60 "$work.log"
    return 1
  fi
}

# As many at once as there are cores; each has one thread.
jobs="${JOBS:-$(nproc)}"
((jobs > 0)) || jobs=1
fuzzers=()
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; exit 130' INT TERM  # which jobs in the background ignore
for fuzzer in "$build"/fuzzers/*_fuzz; do
  if [[ -x "$fuzzer" ]]; then fuzzers+=("$fuzzer"); fi
done
for ((first = 0; first < ${#fuzzers[@]}; first += jobs)); do
  pids=()
  reports=()
  for fuzzer in "${fuzzers[@]:first:jobs}"; do
    reports+=("$build/fuzz-work/$(basename "$fuzzer").txt")
    run "$fuzzer" >"${reports[-1]}" 2>&1 &
    pids+=($!)
  done
  for index in "${!pids[@]}"; do
    if wait "${pids[index]}"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    cat "${reports[index]}"
  done
done
echo "fuzz: $passed passed, $failed failed"
((failed == 0))
