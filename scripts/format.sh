#!/usr/bin/env bash
# Formats every C, C++ and CUDA file and wraps the prose of Markdown files in place; with --check changes nothing and
# fails on a difference.
set -euo pipefail
cd "$(dirname "$0")/.."

code=(-i)
prose=(--fix)
if [[ "${1:-}" == --check ]]; then
  code=(--dry-run --Werror)
  prose=()
fi
folders=()
for folder in include src reference testing cli tests bench examples python; do [[ -d $folder ]] && folders+=("$folder"); done
status=0
find "${folders[@]}" -type f \( -name '*.h' -o -name '*.hpp' -o -name '*.cc' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -r clang-format --style=file "${code[@]}" || status=1
python3 scripts/check_prose.py "${prose[@]}" || status=1
exit "$status"
