// Which instruction sets the kernels are compiled for. Include before any Highway header.
#pragma once

// Machines with SSSE3 but without SSE4 are older than any user of this library; vectors of unknown length
// (SVE, RVV) cannot hold accumulators in arrays, and their machines have NEON. Highway's own scalar target is
// the baseline.
#define HALFTONE_NO_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#ifdef HALFTONE_SANITIZE
// Sanitizers multiply the compile time of every target: the baseline and one vector target show what they look for.
#define HWY_DISABLED_TARGETS (HALFTONE_NO_TARGETS | HWY_SSE4 | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS HALFTONE_NO_TARGETS
#endif
