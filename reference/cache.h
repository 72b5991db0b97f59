// Builds a paged cache the way a serving engine leaves one: scattered pages, garbage behind every live byte.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "halftone/cache.h"
#include "reference/random.h"
#include "reference/tensor.h"

namespace halftone::reference {

struct CacheOptions {
  BlockTableMode table_mode = BlockTableMode::kTrusted;
  bool shuffle = true;    ///< pages in random order; false: request after request
  int spare_pages = 3;    ///< pages that no live entry names, all bytes 0xFF
  int spare_columns = 2;  ///< table entries behind the last page of the largest request
};

/// Owns every tensor of a PagedKv. Pages start as bytes 0xFF: NaN values and scales wherever append does not
/// write. Dead table entries hold INT_MAX, INT_MIN, -1 and random numbers.
class Cache {
 public:
  /// `capacities`: tokens for which each request has pages.
  Cache(const KvCacheSpec& spec, std::span<const int> capacities, Random& random,
        const CacheOptions& options = {});

  PagedKv view() const;

  /// Sets the channels' offset and scale and the static scales that the spec asks for, so that k and v are
  /// stored without clipping; as if there were neither, and scales of 1, where there is nothing to store.
  void calibrate(const Tensor& k, const Tensor& v);

  /// Appends counts[i] tokens to request i (cu_seqlens form) and advances the lengths. k and v hold the new
  /// tokens, request after request.
  void append(std::span<const int> counts, const Tensor& k, const Tensor& v);

  /// Slots (page * page_size + offset) of every live token, request after request.
  std::vector<std::int64_t> slots() const;

  /// Live tokens of all requests.
  std::int64_t total_tokens() const;

  Cache clone() const;
  bool guards_intact() const;

  KvCacheSpec spec;
  BlockTableMode table_mode = BlockTableMode::kTrusted;
  Tensor pages;
  Tensor block_table;
  Tensor lengths;
  Tensor k_scale, k_min, v_scale, v_min;
  Tensor k_offset, k_channel_scale;  ///< PagedKv::k_channels

 private:
  Cache() = default;
};

/// K and V of the live tokens in fp32, in the caller's basis: [total_tokens, kv_heads, head_dim or v_dim].
struct Dequantised {
  Tensor k;
  Tensor v;
};
Dequantised dequantised(const Cache& cache);

/// The same values without any rounding: code * scale + min in double, decoded here from the bytes of the
/// pages, rotated and its channels restored in double. What the oracle takes for the truth; independent of
/// dequantize().
struct ExactValues {
  std::vector<double> k;
  std::vector<double> v;
};
ExactValues exact_values(const Cache& cache);
/// Likewise in the basis in which the pages hold them, nothing rotated back.
ExactValues stored_values(const Cache& cache);

/// The rotation of K, Q and V in double, which is its own inverse, of rows of `dim` values.
void rotate_rows(std::vector<double>& rows, int dim);

}  // namespace halftone::reference
