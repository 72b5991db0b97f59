#!/usr/bin/env bash
# How large the device code of each .cu file of a build is and how long it took to compile, in all and for each kernel,
# which is a row of a table or an instance of a template: scripts/kernel_sizes.sh build/cuda. Seconds are those of the
# last compilation, beside what else Ninja ran; "-": the object comes from another build. The decode kernels have a file
# per format of V, one per group of mixed pairs, and one for the universal kernel.
set -euo pipefail
cd "$1"

objects=CMakeFiles/halftone_objects.dir/src/cuda
[[ -d $objects ]] || { echo "kernel_sizes.sh: no objects of .cu files below $1/$objects" >&2; exit 1; }

# How many kernels an object has: by its PTX, which builds for the emulator keep, or by the functions that launch them, of
# which symbols of any kind tell: the compiler inlines most, but their static variables stay.
kernels_of() {
  local source="${1#CMakeFiles/halftone_objects.dir/}" ptx
  source="${source%.o}"
  ptx="ptx/$source/$(basename "$source" .cu).ptx"
  if [[ -f $ptx ]]; then
    grep -c '\.entry ' "$ptx" || true
  else
    nm "$1" | sed -nE 's/.*[^0-9]([0-9]+)(__device_stub__.*)/\1 \2/p' | awk '{ print substr($2, 1, $1) }' | sort -u | wc -l
  fi
}

# Milliseconds of an object, or "-". A line of the log: start, end, time of change, output, hash; the last one counts.
milliseconds_of() {
  if [[ -f .ninja_log ]]; then
    awk -F'\t' -v object="$1" '$4 == object { last = $2 - $1 } END { print last == "" ? "-" : last }' .ninja_log
  else
    echo -
  fi
}

# Of each object: its name, bytes, kernels, milliseconds.
measure() {
  local object bytes
  while IFS= read -r object; do
    bytes="$(size -A "$object" | awk '$1 == ".nv_fatbin" { sum += $2 } END { print sum + 0 }')"
    echo "$object $bytes $(kernels_of "$object") $(milliseconds_of "$object")"
  done
}

find "$objects" -name '*.cu.o' | sort | measure | awk -v prefix="$objects/" '
  function ratio(n, divisor) { return n == "-" || divisor == 0 ? "-" : sprintf("%.1f", n / divisor) }
  function line(name, bytes, milliseconds, kernels, timed_kernels) {
    printf "  %-30s %7.0f %7s %7d %10s %8s\n", name, bytes / 1024, ratio(milliseconds, 1000), kernels,
      ratio(bytes / 1024, kernels), ratio(milliseconds, 1000 * timed_kernels)
  }
  BEGIN {
    milliseconds = "-"
    printf "  %-30s %7s %7s %7s %10s %8s\n", "device code", "KiB", "s", "kernels", "KiB/kernel", "s/kernel"
  }
  {
    name = substr($1, length(prefix) + 1)
    sub(/\.cu\.o$/, "", name)
    line(name, $2, $4, $3, $3)
    bytes += $2
    kernels += $3
    if ($4 != "-") {
      milliseconds += $4
      timed_kernels += $3
    }
  }
  END { line("total", bytes, milliseconds, kernels, timed_kernels) }'
