// What the kernels receive that read a cache back: dequantise, and the staging of prefill.
#pragma once

#include <cstdint>

#include "format/channels.h"
#include "format/part.h"
#include "halftone/cache.h"

namespace halftone::cuda {

/// A span of K or V of a cache, and where it goes.
struct DequantizeParams {
  page::Part part;
  PageLayout layout;
  const std::uint8_t* pages;  // [num_pages, page_stride bytes]
  std::int64_t page_stride;
  std::int64_t num_pages;
  std::int32_t page_log2;  // tokens per page
  std::int32_t kv_heads;
  const std::int32_t* block_table;  // [batch, table_stride], table_width entries in use
  std::int64_t table_stride, table_width;
  const std::int32_t* lengths;  // [batch]
  std::int32_t batch;
  std::int32_t static_stride;  // 0 per tensor, 1 per head
  const float* static_scale;   // [1] or [kv_heads], or null
  const float* static_min;     // likewise
  Channels channels;           // of K
  void* out;                   // [rows, kv_heads, the span's dims], strides below, in elements
  std::int64_t rows;
  std::int32_t row_tokens;  // a request's rows begin at multiples of it, a power of two
  std::int64_t row_stride, head_stride;
  DType out_type;
  bool aligned;      // rows of `out` begin at multiples of 16 bytes
  bool clears_rest;  // rows beyond the requests' become zeros
};

/// cudaError_t as int. `stream` is a cudaStream_t.
int launch_dequantize(const DequantizeParams& params, void* stream);
/// The same for a latent cache.
int launch_dequantize_records(const DequantizeParams& params, void* stream);

}  // namespace halftone::cuda
