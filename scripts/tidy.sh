#!/usr/bin/env bash
# Runs clang-tidy over src, reference, testing and cli, but for CUDA, with the compile commands of the tidy preset. Argument: a
# pattern of file names (default: all).
set -euo pipefail
cd "$(dirname "$0")/.."

pattern="${1:-.}"
log="build/tidy/clang-tidy.log"
status=0
find src reference testing cli -name '*.cc' -not -path '*/cuda/*' | grep -E "$pattern" | sort |
  xargs -r -n 1 -P "${JOBS:-$(nproc)}" clang-tidy -p build/tidy --quiet >"$log" 2>build/tidy/clang-tidy.err || status=1
cat "$log"
if ((status)); then grep -v 'warnings generated\|Suppressed\|Use -header-filter' build/tidy/clang-tidy.err >&2 || true; fi
exit "$status"
