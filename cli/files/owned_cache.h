// A paged cache with memory of its own, as the commands need it.
#pragma once

#include <vector>

#include "halftone/cache.h"
#include "reference/tensor.h"

namespace halftone::cli {

/// What lies beside a layer's pages: static scales, offset and scale of K's channels; what it lacks is empty.
struct StaticScales {
  std::vector<float> k_scale, k_min, v_scale, v_min;
  std::vector<float> k_offset, k_channel_scale;  ///< [kv_heads, head_dim]

  bool empty() const {
    return k_scale.empty() && v_scale.empty() && k_offset.empty() && k_channel_scale.empty();
  }
};

struct OwnedCache {
  KvCacheSpec spec;
  reference::Tensor pages;                           ///< uint8 [num_pages, page_bytes], zero at first
  reference::Tensor block_table;                     ///< int32 [batch, pages per request]
  reference::Tensor lengths;                         ///< int32 [batch]
  reference::Tensor k_scale, k_min, v_scale, v_min;  ///< f32, present when the format needs them
  reference::Tensor k_offset, k_channel_scale;  ///< f32 [kv_heads, head_dim], present with the spec's flags

  /// Pages for `batch` requests of up to `tokens` tokens each; lengths are 0. Request i owns pages
  /// [i * n, (i + 1) * n), n pages per request.
  OwnedCache(const KvCacheSpec& spec, int batch, std::int64_t tokens);

  /// What a spec with offset_k and scale_k does to K's channels.
  enum class ChannelUse : bool {
    kBoth,    ///< both; one that does not help is neutral
    kChoose,  ///< the spec keeps what helps
  };
  /// Offset and scale of K's channels if the spec has them, and static scales for formats that have them,
  /// from tensors [tokens, heads, dim] that will be appended. q: queries that will meet K, if known.
  void calibrate(const TensorView& k, const TensorView& v, const TensorView& q = {},
                 ChannelUse use = ChannelUse::kBoth);

  /// What was found before. The spec gets those of the channels.
  void set_scales(const StaticScales& scales);
  StaticScales scales() const;

  /// Appends to request `i` and raises its length.
  void append(int request, const TensorView& k, const TensorView& v);

  PagedKv view() const;

 private:
  void set_channels(const std::vector<float>& offset, const std::vector<float>& scale);
};

/// `count` tokens of `x` [tokens, heads, dim] from `first` on.
TensorView token_range(const TensorView& x, std::int64_t first, std::int64_t count);

}  // namespace halftone::cli
