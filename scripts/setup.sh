#!/usr/bin/env bash
# Installs what a make target needs and nothing else: scripts/setup.sh GROUP...
#   build  compiler, CMake, Ninja and the libraries of libhalftone and its command
#   test   GoogleTest, pkg-config and the virtual environment of the Python tests
#   python the Python package's tests (into the virtual environment)
#   wheel  what builds and checks the package's wheel (likewise)
#   integrations  torch, transformers and pytest (a virtual environment of their own)
#   bench  Google Benchmark
#   clang  clang with its sanitizer and OpenMP run-times and lld
#   format clang-format and python3
#   tidy   clang-tidy (into the virtual environment)
#   nvdisasm  the disassembler of machine code for GPUs (likewise)
# As root on Debian or Ubuntu it installs; otherwise it prints the command that is missing and fails.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=()
requirements=()
for group in "$@"; do
  case "$group" in
    build)  packages+=(g++ cmake ninja-build libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev) ;;
    test)   packages+=(libgtest-dev pkg-config); requirements+=(test) ;;
    python) requirements+=(test python) ;;
    wheel)  requirements+=(test python wheel) ;;
    integrations) requirements+=(integrations integrations-oldest) ;;
    bench)  packages+=(libbenchmark-dev) ;;
    clang)  packages+=(clang libclang-rt-dev libomp-dev lld) ;;
    format) packages+=(clang-format python3) ;;
    tidy)   requirements+=(tidy) ;;
    nvdisasm) requirements+=(nvdisasm) ;;
    *) echo "setup.sh: unknown group '$group'" >&2; exit 2 ;;
  esac
done
if ((${#requirements[@]})); then packages+=(python3 python3-venv ca-certificates); fi

installed() { [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]; }

missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${packages[@]}"; do installed "$package" || missing+=("$package"); done
else
  echo "setup: this is not a Debian system; the packages (Debian names) needed are: ${packages[*]}" >&2
fi
if ((${#missing[@]})); then
  install=(apt-get install -y --no-install-recommends "${missing[@]}")
  if ((EUID != 0)); then
    echo "setup: missing system packages, and installing them needs root. Run:" >&2
    echo "  sudo apt-get update && sudo ${install[*]}" >&2
    exit 1
  fi
  echo "setup: installing system packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q
  "${install[@]}" -q
fi

# A virtual environment follows its requirements files: their hash is the stamp.
for name in $(printf '%s\n' "${requirements[@]}" | awk '!seen[$0]++'); do
  file="requirements/$name.txt"
  venv=build/venv
  into=()
  case "$name" in
    integrations) venv=build/integrations-venv ;;
    integrations-oldest) venv=build/integrations-venv; into=(--target "$venv/oldest" --upgrade) ;;
  esac
  stamp="$venv/.installed-$name"
  sum="$(sha256sum <"$file")"
  [[ -f "$stamp" && "$(<"$stamp")" == "$sum" ]] && continue
  [[ -x "$venv/bin/python" ]] || { echo "setup: creating $venv"; python3 -m venv "$venv"; }
  echo "setup: installing $file into $venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes \
    --only-binary :all: "${into[@]}" -r "$file" || {
    echo "setup: pip cannot install $file (above is why). Its first lines name the machines that it is for. Without a" >&2
    echo "  package index, name a folder that holds its wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make ..." >&2
    exit 1
  }
  printf '%s' "$sum" >"$stamp"
done
