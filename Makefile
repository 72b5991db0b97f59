# Every target sets up what it needs (scripts/setup.sh) and then drives a CMake preset. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-gpu test-integrations cuda emulated wheel bench asan tsan fuzz format format-check tidy install clean

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
SAMPLE := data/llama-tiny-capture.safetensors
REPORT := report.html

# CUDA is used where there is both a compiler and a GPU to run the result; `make demo GPU=` turns it off.
NVCC := $(firstword $(CUDACXX) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
GPU := $(if $(NVCC),$(wildcard /dev/nvidia0))
ifeq ($(GPU),)
  GROUPS_HERE := build
  PRESET_HERE := release
  TEST_PRESET_HERE := test
else
  GROUPS_HERE := build test
  PRESET_HERE := cuda
  TEST_PRESET_HERE := cuda
endif
BUILD_HERE := build/$(PRESET_HERE)

# ON: no build of the emulated tests without the check of machine code (`make emulated`).
NEED_NVDISASM ?= OFF

# A Python that has torch, for the tests of the Python package on the GPU; torch is too large to be installed for them.
TORCH_PYTHON ?= $(shell python3 -c 'import numpy, pytest, torch, tvm_ffi, sys; print(sys.executable)' 2>/dev/null)

setup = scripts/setup.sh
configure = cmake --preset $(1) $(2) >build/configure-$(1).log 2>&1 || { cat build/configure-$(1).log; exit 1; }
compile = cmake --build build/$(1) -j $(JOBS) $(if $(2),--target $(2))
python = -DHALFTONE_PYTHON=$(CURDIR)/build/venv/bin/python
package = -DHALFTONE_PYTHON_PACKAGE=ON -DHALFTONE_GLIBC=2.28
cuda_options = -DCMAKE_CUDA_COMPILER=$(NVCC) $(python) -DHALFTONE_EMULATE=$(if $(GPU),OFF,ON) \
	-DHALFTONE_NEED_NVDISASM=$(NEED_NVDISASM)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: ## every format on the shipped sample: a table here, report.html beside it
	@$(setup) $(GROUPS_HERE)
	@mkdir -p build
	@$(call configure,$(PRESET_HERE),$(if $(GPU),$(cuda_options)))
	@$(call compile,$(PRESET_HERE),halftone_command)
	$(BUILD_HERE)/bin/halftone eval $(SAMPLE) --html $(REPORT)

test: ## build and run every test that this machine can run
	@$(setup) $(GROUPS_HERE) test python
	@mkdir -p build
	@$(call configure,$(TEST_PRESET_HERE),$(if $(GPU),$(cuda_options),$(python)) $(package))
	@$(call compile,$(PRESET_HERE))
	@scripts/ctest.sh $(BUILD_HERE)

test-integrations: ## the tests with torch and transformers, in an environment of their own (x86-64, 4 GB)
	@$(setup) build test python integrations
	@mkdir -p build
	@$(call configure,test,$(python) $(package))
	@$(call compile,release,halftone_python halftone_command)
	@scripts/integrations.sh build/release

cuda: ## compile the CUDA backend, its tests and the command (needs nvcc, not a GPU)
	@$(if $(NVCC),,echo "make cuda: no nvcc on PATH or in /usr/local/cuda/bin; install the CUDA toolkit 12.8 or newer, or set CUDACXX" >&2; exit 1)
	@$(setup) build test python
	@scripts/share_objects.sh build/release build/cuda
	@$(call configure,cuda,$(cuda_options) $(package) -DHALFTONE_TORCH_PYTHON=$(TORCH_PYTHON))
	@$(call compile,cuda,halftone_cuda)
	@scripts/kernel_sizes.sh build/cuda

emulated: ## run tests of the CUDA backend on an emulator of the GPU (needs nvcc; GPU= on a machine that has one)
	@$(setup) nvdisasm
	@$(MAKE) --no-print-directory cuda NEED_NVDISASM=ON
	@$(call compile,cuda,halftone_emulated)
	@scripts/ctest.sh build/cuda -L emulated

test-gpu: ## run the tests that need an NVIDIA GPU
	@$(if $(wildcard /dev/nvidia0),,echo "make test-gpu: this machine has no NVIDIA GPU (no /dev/nvidia0)" >&2; exit 1)
	@$(if $(TORCH_PYTHON),,echo "make test-gpu: no Python with torch, numpy, pytest and apache-tvm-ffi (TORCH_PYTHON=...): its tests are left out" >&2)
	@$(MAKE) --no-print-directory cuda
	@scripts/ctest.sh build/cuda -L cuda

wheel: ## build the Python package's wheel, install it into an empty virtual environment and try it there
	@$(setup) build wheel $(if $(NVCC),test)
	@scripts/wheel.sh $(if $(NVCC),cuda $(NVCC),release)

bench: ## build and run the benchmarks (BENCH_ARGS are passed on)
	@$(setup) $(GROUPS_HERE) bench
	@mkdir -p build
	@$(call configure,$(PRESET_HERE),-DHALFTONE_BUILD_BENCH=ON $(if $(GPU),$(cuda_options)))
	@$(call compile,$(PRESET_HERE),halftone_benchmarks)
	@for bench in $(BUILD_HERE)/benchmarks/*_bench; do [[ ! -x $$bench ]] || $$bench $(BENCH_ARGS); done

asan: ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(setup) build test clang
	@mkdir -p build
	@$(call configure,asan,$(python))
	@$(call compile,asan)
	@scripts/ctest.sh build/asan

tsan: ## the tests in which threads meet, under ThreadSanitizer
	@$(setup) build test clang
	@mkdir -p build
	@$(call configure,tsan,$(python))
	@$(call compile,tsan)
	@scripts/ctest.sh build/tsan

fuzz: ## run each fuzzer for FUZZ_SECONDS (10) over its committed corpus
	@$(setup) build clang
	@mkdir -p build
	@$(call configure,fuzz)
	@$(call compile,asan,halftone_fuzzers)
	@scripts/fuzz.sh

format: ## format the sources and wrap the prose in place
	@$(setup) format
	@scripts/format.sh

format-check: ## fail if a source is not formatted or prose is not wrapped
	@$(setup) format
	@scripts/format.sh --check

tidy: ## clang-tidy over src, reference, testing and cli
	@$(setup) build clang tidy
	@mkdir -p build
	@$(call configure,tidy)
	@$(call compile,tidy,halftone_commit) >/dev/null
	@scripts/tidy.sh

install: ## install the release build under PREFIX (/usr/local)
	@$(setup) build
	@mkdir -p build
	@$(call configure,release)
	@$(call compile,release)
	cmake --install build/release --prefix $(PREFIX)

clean: ## remove everything built here
	rm -rf build $(REPORT)
