#!/usr/bin/env bash
# How large the device code of each .cu file of a build is: scripts/kernel_sizes.sh build/cuda. The decode kernels have
# a file per format of V, one per group of mixed pairs, and one for the universal kernel.
set -euo pipefail

objects="$(find "$1/CMakeFiles/halftone_objects.dir/src/cuda" -name '*.cu.o' | sort)"
total=0
echo "device code, KiB:"
while IFS= read -r object; do
  bytes="$(size -A "$object" | awk '$1 == ".nv_fatbin" { sum += $2 } END { print sum + 0 }')"
  name="${object#*/src/cuda/}"
  printf '  %-26s %7d\n' "${name%.cu.o}" $((bytes / 1024))
  total=$((total + bytes))
done <<<"$objects"
printf '  %-26s %7d\n' total $((total / 1024))
