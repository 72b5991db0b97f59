// What a model computes before a layer of attention: a product of the new tokens with weights, which of up to
// 8 tokens it reads at two thirds of the rate of plain reads (4096 x 4096 on an H200: 3.0 TB/s; of 64 tokens
// 1.95). Plain C++: the kernel is in gemm_kernel.cu.
#pragma once

#include "halftone/types.h"

namespace halftone::cli::cuda {

/// out [rows, columns] = x [rows, depth] times the transpose of weights [columns, depth], all in bf16, with
/// sums in fp32.
struct Gemm {
  const void* x = nullptr;        ///< 16-byte aligned
  const void* weights = nullptr;  ///< likewise
  void* out = nullptr;            ///< 8-byte aligned
  int rows = 0;
  int columns = 0;  ///< a multiple of kGemmColumns
  int depth = 0;    ///< a multiple of kGemmDepth
};
inline constexpr int kGemmColumns = 64, kGemmDepth = 1024;

/// Enqueues it. Each block waits for the kernel before and lets the next one start at once. Returns a
/// cudaError_t.
int launch_gemm(const Gemm& gemm, Stream stream);

}  // namespace halftone::cli::cuda
