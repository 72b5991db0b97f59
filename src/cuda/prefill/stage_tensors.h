// Tensors as codes of E4M3: what run() writes into the workspace before `fp8` prefill over plain K and V.
#pragma once

#include <cstdint>

#include "format/host_device.h"
#include "halftone/types.h"

namespace halftone::cuda {

/// A tile of 16 tokens of V is staged in so many parts, of up to 128 dims.
HT_HOST_DEVICE constexpr int value_parts(int value_dim) { return (value_dim + 127) / 128; }
/// V of a request and head has one power of two, for which its largest magnitude is looked for in runs of so
/// many tokens. It is read once where the largest of each run is of the same one as the largest of all.
HT_HOST_DEVICE constexpr int value_run(int value_dim) { return 128 / value_parts(value_dim); }
/// Of how many runs there is room.
HT_HOST_DEVICE constexpr std::int64_t value_runs(std::int64_t rows, std::int64_t batch, int value_dim) {
  return rows / value_run(value_dim) + batch;
}

/// A request's rows begin at multiples of 16 among the staged ones. Infinities become NaN.
struct StageTensorsParams {
  const void *k, *v;                           // [tokens, heads, dim], rows at multiples of 16 bytes
  std::int64_t k_token_stride, k_head_stride;  // elements
  std::int64_t v_token_stride, v_head_stride;
  std::int64_t tokens;             // rows of k and v
  const std::int32_t* cu_kv;       // [batch] first row of a request
  const std::int32_t* kv_lengths;  // [batch]
  std::int32_t batch, heads;
  std::int32_t key_dim, value_dim;  // 64, 128, 192, 256 or 512 both, or 192 and 128
  DType type;                       // kFloat16 or kBFloat16
  std::int64_t rows;                // staged ones, a multiple of 16
  std::uint8_t* k_codes;            // [rows, heads, key_dim] as StagedAs::kE4m3Codes
  std::uint8_t* v_tiles;            // [heads, rows / 16, value_dim, 16] as value_tiles.h
  float* k_scales;                  // [heads, rows]
  float* run_maxima;                // [heads, value_runs(rows, batch, value_dim)] of finite magnitudes of V
  float* v_units;                   // [batch, heads] what codes of V are multiplied by
  std::int32_t* first;              // [batch] where requests begin among the staged rows
  std::int32_t* first_run;          // [batch + 1] likewise among all runs, and how many there are
  std::int32_t* present;            // [batch] their keys that k and v have
};

/// Two kernels. cudaError_t as int.
int launch_stage_tensors(const StageTensorsParams& params, void* stream);

}  // namespace halftone::cuda
