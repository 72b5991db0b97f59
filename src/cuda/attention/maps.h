// Tensor maps: what the tensor copies of a launch read and write.
#pragma once

#include <cuda.h>

#include "plan/plan.h"

namespace halftone::cuda {

/// Throws DeviceError if the driver lacks tensor maps.
void require_tensor_maps();

/// Whether boxes of [tokens][heads][dim] can be copied: they lie at multiples of 16 bytes.
bool has_boxes(const TensorView& t);

/// [tokens][heads][dim], of 8 or 16 bits: boxes of `row_bytes` (128 or 64) of dims, `heads` heads and
/// `tokens` tokens, swizzled over a row. What a tensor without elements points to, `somewhere`, is never
/// read.
CUtensorMap tensor_map(const TensorView& t, const void* somewhere, int heads, int tokens,
                       int row_bytes = 128);

/// 16-bit K or V of pages, [pages][heads][tiles][tokens][dim]: such boxes of a tile. `offset`: of the part
/// within a tile.
CUtensorMap page_map(const PagedKv& cache, const PageLayout& layout, std::int64_t offset, int dim,
                     DType dtype, int row_bytes);

/// K of pages in codes of 8 bits, which lie there in chunks of 64 dims (format/page.h),
/// [pages][heads][tiles][chunks and tokens][dims]: boxes of a chunk's tokens of `tiles` tiles, swizzled over
/// 64 bytes.
CUtensorMap code_page_map(const PagedKv& cache, const PageLayout& layout, int dim, int tiles);

/// 16-bit latent tokens of pages as [pages][groups of 8 tokens][columns of 64 dims][tokens][dims]: boxes of
/// `tokens` tokens and `columns` columns of one page, swizzled over a row. Where there are no pages nothing
/// is read, and `somewhere` is any address on the device.
CUtensorMap latent_page_map(const PagedKv& cache, const PageLayout& layout, const void* somewhere,
                            DType dtype, int tokens, int columns);

}  // namespace halftone::cuda
