// A paged cache with memory of its own, as the commands need it.
#pragma once

#include <vector>

#include "halftone/cache.h"
#include "reference/tensor.h"

namespace halftone::cli {

/// Static scales of a layer; those that its formats lack are empty.
struct StaticScales {
  std::vector<float> k_scale, k_min, v_scale, v_min;
};

struct OwnedCache {
  KvCacheSpec spec;
  testing::Tensor pages;                           ///< uint8 [num_pages, page_bytes], zero at first
  testing::Tensor block_table;                     ///< int32 [batch, pages per request]
  testing::Tensor lengths;                         ///< int32 [batch]
  testing::Tensor k_scale, k_min, v_scale, v_min;  ///< f32, present when the format needs them

  /// Pages for `batch` requests of up to `tokens` tokens each; lengths are 0. Request i owns pages
  /// [i * n, (i + 1) * n), n pages per request.
  OwnedCache(const KvCacheSpec& spec, int batch, std::int64_t tokens);

  /// Static scales for formats that have them, from tensors [tokens, heads, dim] that will be appended.
  void calibrate(const TensorView& k, const TensorView& v);

  /// Static scales that were found before.
  void set_scales(const StaticScales& scales);
  StaticScales scales() const;

  /// Appends to request `i` and raises its length.
  void append(int request, const TensorView& k, const TensorView& v);

  PagedKv view() const;
};

/// `count` tokens of `x` [tokens, heads, dim] from `first` on.
TensorView token_range(const TensorView& x, std::int64_t first, std::int64_t count);

}  // namespace halftone::cli
