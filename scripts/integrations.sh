#!/usr/bin/env bash
# Runs the tests of the integrations over the library and the command of a build folder: scripts/integrations.sh BUILD_DIR.
# Once for each end of the range of transformers that is tested; ends with "N passed, N failed", of both.
set -uo pipefail
cd "$(dirname "$0")/.."
build="$(realpath "$1")"
venv=build/integrations-venv
results="$build/integration-results"

rm -rf "$results"
mkdir -p "$results"
export HALFTONE_PYTHON_LIBRARY="$build/lib/libhalftone_python.so" HALFTONE_COMMAND="$build/bin/halftone"
# Both at once: the tests of one keep a single core busy.
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; exit 130' INT TERM  # which jobs in the background ignore
for version in newest oldest; do
  path="$PWD/python"
  [[ $version == oldest ]] && path="$PWD/$venv/oldest:$path"
  PYTHONPATH="$path" "$venv/bin/python" -m pytest -q -p no:cacheprovider --rootdir "$PWD" tests/integrations \
    "--junitxml=$results/$version.xml" >"$results/$version.log" 2>&1 &
  pids+=($!)
done
status=0
for version in newest oldest; do
  wait "${pids[0]}" || status=1
  pids=("${pids[@]:1}")
  echo "integrations: the $version transformers"
  cat "$results/$version.log"
done
python3 scripts/count_tests.py "$results" || status=1
exit "$status"
