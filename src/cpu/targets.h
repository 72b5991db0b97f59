// Which instruction sets the kernels are compiled for. Include before any Highway header.
#pragma once

// x86 machines without AVX2 are served by Highway's baseline, which is scalar or emulates vectors: kernels
// for SSE4 were a fifth of the CPU's code. Vectors of unknown length (SVE, RVV) cannot hold accumulators in
// arrays, and their machines have NEON.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later) has kernels of its own: byte_dots-inl.h.
#define HWY_WANT_AVX3_DL
