// Kernel launches as plain C++ functions: what backend.cc calls and the .cu files define.
#pragma once

#include "cuda/merge_params.h"
#include "cuda/params.h"

namespace halftone::cuda {

struct ScheduleBuildParams;
struct DequantizeParams;

/// A compiled kernel: row of kDecodeTable -> function and shared memory. Null when the row is not in this
/// build.
struct DecodeKernel {
  const void* function = nullptr;
  int shared_bytes = 0;
  int threads = 0;
};

/// The slices in which the table is compiled, one .cu file each. They return null for rows of another slice.
DecodeKernel decode_kernel_16bit(int row);
DecodeKernel decode_kernel_fp8(int row);
DecodeKernel decode_kernel_int8(int row);
DecodeKernel decode_kernel_int4(int row);
DecodeKernel decode_kernel_mixed8(int row);  // by the bits of V
DecodeKernel decode_kernel_mixed4(int row);
/// The universal kernel, for any format of K and V.
DecodeKernel decode_kernel_any(int head_dim, int v_dim);

/// cudaError_t as int. `stream` is a cudaStream_t.
int launch_schedule(const ScheduleBuildParams& params, void* stream);
int launch_append(const AppendParams& params, void* stream);
/// lengths[i] += cu_seqlens[i + 1] - cu_seqlens[i] for every request.
int launch_advance(std::int32_t* lengths, const std::int32_t* cu_seqlens, std::int32_t batch, void* stream);
int launch_dequantize(const DequantizeParams& params, void* stream);
int launch_merge(const LargestMerge& params, void* stream);

}  // namespace halftone::cuda
