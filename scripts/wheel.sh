#!/usr/bin/env bash
# Builds the Python package's wheel and tries it in an empty virtual environment: scripts/wheel.sh release | cuda NVCC.
# It shares the build folder of that CMake preset, so that what `make test` or `make cuda` compiled is only linked.
# The result is the one wheel in build/wheel/; ends with "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")/.."

preset="$1"
venv="$PWD/build/venv/bin"
glibc=2.28  # the oldest that the wheel runs with: its tag is manylinux_2_28
defines=(HALFTONE_PYTHON="$venv/python" HALFTONE_BUILD_CLI=ON HALFTONE_WERROR=ON HALFTONE_GLIBC="$glibc")
if [[ "$preset" == cuda ]]; then
  defines+=(HALFTONE_CUDA=ON CMAKE_CUDA_COMPILER="$2")
fi
settings=(--config-settings=build-dir="build/$preset")
for define in "${defines[@]}"; do settings+=(--config-settings=cmake.define."$define"); done

rm -rf build/wheel build/wheel-venv
mkdir -p build/wheel/raw
echo "wheel: building (preset $preset)"
PATH="$venv:$PATH" "$venv/python" -m pip wheel . --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --no-index --wheel-dir build/wheel/raw "${settings[@]}" >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
# libtvm_ffi.so belongs to apache-tvm-ffi, a dependency; what else is not the system's is bundled. The system's libgomp is
# for its own glibc: the one to bundle was built for 2.28 (requirements/wheel.txt).
"$venv/python" -c "import pathlib, pykdtree, shutil
[gomp] = pathlib.Path(pykdtree.__path__[0]).parent.glob('pykdtree.libs/libgomp-*')
shutil.copy(gomp, 'build/wheel/raw/libgomp.so.1')"
LD_LIBRARY_PATH="$PWD/build/wheel/raw" PATH="$venv:$PATH" "$venv/python" -m auditwheel repair \
  --plat "manylinux_${glibc/./_}_$(uname -m)" --exclude libtvm_ffi.so --wheel-dir build/wheel \
  build/wheel/raw/*.whl >>build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
rm -rf build/wheel/raw
wheel="$(ls "$PWD"/build/wheel/*.whl)"
echo "wheel: $wheel, $(stat -c %s "$wheel") bytes"

passed=0
failed=0
# try WHAT COMMAND...: runs it away from the source tree.
try() {
  local what="$1"
  shift
  if (cd build/wheel-venv && env -u PYTHONPATH -u HALFTONE_PYTHON_LIBRARY "$@"); then
    echo "wheel: $what: ok"
    passed=$((passed + 1))
  else
    echo "wheel: $what: FAILED" >&2
    failed=$((failed + 1))
  fi
}

python3 -m venv build/wheel-venv
python="$PWD/build/wheel-venv/bin/python"
pip=("$python" -m pip install --quiet --disable-pip-version-check --no-deps)
# pick NAME...: the entries of these packages in requirements/python.txt.
pick() { awk -v names=" $* " '/^[A-Za-z]/ { split($1, p, "=="); on = index(names, " " p[1] " ") } on' requirements/python.txt; }
pick apache-tvm-ffi typing-extensions >build/wheel-venv/needed.txt
"${pip[@]}" --require-hashes --only-binary :all: -r build/wheel-venv/needed.txt
"${pip[@]}" --no-index "$wheel"
try "the halftone command" "$PWD/build/wheel-venv/bin/halftone" eval "$PWD/data/llama-tiny-capture.safetensors" \
  --formats int8-head,int4-g32 --html report.html
try "its exit status" bash -c '[[ "$(bin/halftone nothing 2>&1; echo $?)" == *"command is"*2 ]]'
# Whoever bundles a library passes its licence on: a file of licenses/ names it.
try "a licence for every bundled part" "$python" -c \
  "import importlib.metadata as m, re
files = m.files('halftone-attention')
texts = ''.join(f.read_text() for f in files if '/licenses/' in str(f))
parts = [re.match('[a-z_]+', f.name)[0] + '.so' for f in files if '.libs' in str(f)]
parts += ['CLI11', 'JSON for Modern C++', '{fmt}', 'libstdc++']
missing = [part for part in parts if part not in texts]
assert len(parts) > 5 and not missing, (parts, missing)
print(', '.join(parts))"
try "no symbol newer than the glibc of its tag" "$python" "$PWD/scripts/wheel_symbols.py" "$wheel"
try "import without NumPy, torch or a GPU" "$python" -c \
  "import importlib.util as u; assert not u.find_spec('numpy') and not u.find_spec('torch')
import halftone; print('halftone', halftone.__version__, 'with' if halftone.has_cuda else 'without', 'CUDA')"
"${pip[@]}" --require-hashes --only-binary :all: -r requirements/test.txt
try "the NumPy example" "$python" "$PWD/python/examples/numpy_decode.py"
# From the source archive, which leaves out what only the repository needs, one can build as well.
source_archive() {
  "$venv/python" -c "from scikit_build_core.build import build_sdist; build_sdist('build/wheel-venv/source')" >/dev/null
  tar xzf build/wheel-venv/source/*.tar.gz -C build/wheel-venv/source --strip-components=1
  [[ ! -e build/wheel-venv/source/build && ! -e build/wheel-venv/source/tests ]]
  cmake -S build/wheel-venv/source -B build/wheel-venv/source/out -DHALFTONE_PYTHON_PACKAGE=ON \
    -DHALFTONE_PYTHON="$venv/python" >/dev/null
}
export -f source_archive
export venv
try "the source archive configures" env -C "$PWD" bash -euo pipefail -c source_archive
echo "$passed passed, $failed failed"
((failed == 0))
