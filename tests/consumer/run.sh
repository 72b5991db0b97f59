#!/usr/bin/env bash
# Installs the build into a temporary prefix and builds and runs a small program against it, in C++ through
# find_package and in C through pkg-config: run.sh CMAKE BUILD_DIR VERSION.
set -euo pipefail
cmake="$1"
build="$2"
version="$3"
here="$(cd "$(dirname "$0")" && pwd)"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
prefix="$work/prefix"
"$cmake" --install "$build" --prefix "$prefix" >"$work/install.log" || { cat "$work/install.log"; exit 1; }

# C++: find_package(halftone CONFIG) and halftone::halftone.
"$cmake" -S "$here" -B "$work/cpp" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" -DHALFTONE_WANTED_VERSION="$version" \
  >"$work/cpp.log" && "$cmake" --build "$work/cpp" >>"$work/cpp.log" || { cat "$work/cpp.log"; exit 1; }
"$work/cpp/consumer"

# C: pkg-config, and a prefix that the file itself knows (it may be moved).
mv "$prefix" "$work/moved"
pc="$(dirname "$(find "$work/moved" -name halftone.pc)")"
export PKG_CONFIG_PATH="$pc"
[[ "$(pkg-config --modversion halftone)" == "$version" ]]
static=()
compgen -G "$(pkg-config --variable=libdir halftone)/libhalftone.so*" >/dev/null || static=(--static)
read -ra flags <<<"$(pkg-config "${static[@]}" --cflags --libs halftone)"
cc -std=c99 -Wall -Wextra -Wpedantic -Werror "$here/consumer.c" "${flags[@]}" -lm -o "$work/consumer_c"
LD_LIBRARY_PATH="$(pkg-config --variable=libdir halftone)" "$work/consumer_c"
