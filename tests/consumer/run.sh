#!/usr/bin/env bash
# A user's view. Installs the build into a temporary prefix and builds and runs small programs against it: in C++
# through find_package, among them the examples of README.md and docs/recipe.md as they stand there, and in C through
# pkg-config. Then the same programs with halftone as a part of their project: run.sh CMAKE BUILD_DIR VERSION.
set -euo pipefail
cmake="$1"
build="$2"
version="$3"
here="$(cd "$(dirname "$0")" && pwd)"
root="$(cd "$here/../.." && pwd)"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
prefix="$work/prefix"
"$cmake" --install "$build" --prefix "$prefix" >"$work/install.log" || { cat "$work/install.log"; exit 1; }

# block LANGUAGE: the first block in this language under "In C++" of README.md.
block() { sed -n '/^## In C++/,/^## The house/p' "$root/README.md" | sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/p" | sed '1d;/^```/,$d'; }
block cpp >"$work/readme.cc"
block text >"$work/readme.txt"

# The example of docs/recipe.md, on a recipe of the command.
sed -n '/^```cpp$/,/^```$/p' "$root/docs/recipe.md" | sed '1d;$d' >"$work/recipe.cc"
"$build/bin/halftone" recipe "$root/data/llama-tiny-capture.safetensors" --formats int4-g32,int8-head --max-queries 32 \
  --bytes-per-token 900 --output "$work/recipe.json" >/dev/null
cat >"$work/recipe.txt" <<'TEXT'
layer 3: 320 bytes per token, 327680 for 16 pages
layer 5: 520 bytes per token, 532480 for 16 pages
TEXT

# configure DIR OPTION...: this folder's project.
configure() {
  local dir="$1"
  shift
  "$cmake" -S "$here" -B "$dir" -G Ninja -DREADME_EXAMPLE="$work/readme.cc" \
    -DRECIPE_EXAMPLE="$work/recipe.cc" "$@" >"$dir.log" 2>&1 || { cat "$dir.log"; exit 1; }
}
# build_and_run DIR: its programs.
build_and_run() {
  "$cmake" --build "$1" >"$1.log" || { cat "$1.log"; exit 1; }
  "$1/consumer"
  "$1/readme" | diff "$work/readme.txt" -
  "$1/recipe" "$work/recipe.json" | diff "$work/recipe.txt" -
}

# C++: find_package(halftone CONFIG) and halftone::halftone.
configure "$work/cpp" -DCMAKE_PREFIX_PATH="$prefix" -DHALFTONE_WANTED_VERSION="$version"
build_and_run "$work/cpp"

# C: pkg-config, and a prefix that the file itself knows (it may be moved). A shared library asks for no other package,
# so that its users need none of the packages that it was built with.
mv "$prefix" "$work/moved"
pc="$(dirname "$(find "$work/moved" -name halftone.pc)")"
export PKG_CONFIG_PATH="$pc"
[[ "$(pkg-config --modversion halftone)" == "$version" ]]
static=()
if compgen -G "$(pkg-config --variable=libdir halftone)/libhalftone.so*" >/dev/null; then
  PKG_CONFIG_LIBDIR="$pc" pkg-config --cflags --libs halftone >/dev/null
else
  static=(--static)
fi
read -ra flags <<<"$(pkg-config "${static[@]}" --cflags --libs halftone)"
cc -std=c99 -Wall -Wextra -Wpedantic -Werror "$here/consumer.c" "${flags[@]}" -lm -o "$work/consumer_c"
LD_LIBRARY_PATH="$(pkg-config --variable=libdir halftone)" "$work/consumer_c"

# add_subdirectory: only the library is built and installed, optimised although the project says nothing about it, and
# the project's own settings stay as they are. A static library must find what it links as well.
for shared in ON OFF; do
  part="$work/part-$shared"
  configure "$part" -DHALFTONE_SOURCE="$root" -DBUILD_SHARED_LIBS="$shared" -DHALFTONE_WERROR=ON
  built="$("$cmake" --build "$part" -- -t inputs all | grep -E '^[^/].*\.(o|a|so)$')"
  more="$(grep -vE '/(halftone_objects|consumer|readme|recipe)\.dir/|^halftone/libhalftone\.' <<<"$built" || true)"
  [[ -z "$more" ]] || { echo "add_subdirectory builds more than the library: $more"; exit 1; }
  grep -q 'halftone_objects.*src/api.cc' "$part/compile_commands.json"
  ! grep 'halftone_objects' "$part/compile_commands.json" | grep -v -e ' -O3 ' || exit 1
  [[ -z "$(sed -n 's/^CMAKE_BUILD_TYPE:[^=]*=//p' "$part/CMakeCache.txt")" ]]
  "$cmake" --install "$part" --prefix "$part/prefix" >/dev/null && [[ ! -e "$part/prefix" ]]
  # Compiled for real where ccache has what the build compiled with the same options.
  if command -v ccache >/dev/null; then build_and_run "$part"; fi
done
