#!/usr/bin/env bash
# Formats every C, C++ and CUDA file in place; with --check changes nothing and fails on a difference.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=(-i)
[[ "${1:-}" == --check ]] && mode=(--dry-run --Werror)
folders=()
for folder in include src reference testing cli tests bench examples python; do [[ -d $folder ]] && folders+=("$folder"); done
find "${folders[@]}" -type f \( -name '*.h' -o -name '*.cc' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -r clang-format --style=file "${mode[@]}"
