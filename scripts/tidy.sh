#!/usr/bin/env bash
# Runs the clang-tidy of requirements/tidy.txt over src, reference, testing and cli, but for CUDA,
# with the compile commands of the tidy preset. Argument: a pattern of file names (default: all).
set -euo pipefail
cd "$(dirname "$0")/.."

pattern="${1:-.}"
tidy=build/venv/bin/clang-tidy
[[ -x $tidy ]] || { echo "tidy.sh: there is no $tidy: run scripts/setup.sh tidy" >&2; exit 1; }
log="build/tidy/clang-tidy.log"
status=0
# The package has its clang's own headers but not omp.h: for that the compiler's come after all
# others, because the rest of them is of another version.
options=(-p build/tidy --quiet
  --extra-arg=-idirafter --extra-arg="$(dirname "$(clang++ -print-file-name=include/omp.h)")")
# Large files first, so that all jobs end together.
find src reference testing cli -name '*.cc' -not -path '*/cuda/*' -printf '%s\t%p\n' | sort -rn | cut -f 2 |
  grep -E "$pattern" |
  xargs -r -n 1 -P "${JOBS:-$(nproc)}" "$tidy" "${options[@]}" >"$log" 2>build/tidy/clang-tidy.err || status=1
cat "$log"
if ((status)); then grep -v 'warnings generated\|Suppressed\|Use -header-filter' build/tidy/clang-tidy.err >&2 || true; fi
exit "$status"
