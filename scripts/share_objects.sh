#!/usr/bin/env bash
# Starts a build folder with the objects of another: scripts/share_objects.sh FROM TO. Ninja takes those whose command and
# inputs are the same in TO and compiles the others, so that nothing here has to know which. A folder TO that Ninja has
# built in stays as it is.
set -euo pipefail
from="$1"
to="$(realpath -m "$2")"

mkdir -p "$to"
[[ -f "$from/.ninja_deps" && ! -e "$to/.ninja_log" ]] || exit 0
cd "$from"
awk -F'\t' '/^#/ || $4 ~ /\.o$/' .ninja_log >"$to/.ninja_log"
cp .ninja_deps "$to"
# Ninja compares times, too.
find CMakeFiles -name '*.o' -exec cp --preserve=timestamps --parents -t "$to" {} +
