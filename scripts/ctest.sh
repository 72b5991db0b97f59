#!/usr/bin/env bash
# Runs the tests of a build folder and counts them: scripts/ctest.sh BUILD_DIR [ctest options].
# Ends with "N passed, N failed": test cases where the executable is a GoogleTest one, executables elsewhere.
set -uo pipefail
build="$1"
shift

rm -rf "$build/test-results"
mkdir -p "$build/test-results"
ctest --test-dir "$build" --output-on-failure --output-junit test-results/ctest.junit -j "${JOBS:-$(nproc)}" "$@"
status=$?
python3 "$(dirname "$0")/count_tests.py" "$build/test-results" || status=1
exit "$status"
