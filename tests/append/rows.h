// Caches to read back, and rows to read them into.
#pragma once

#include <cstdint>
#include <vector>

#include "halftone/cache.h"
#include "reference/cache.h"
#include "reference/random.h"
#include "reference/tensor.h"

namespace halftone::testing {

using reference::Cache;
using reference::Data;
using reference::Random;
using reference::Tensor;

inline constexpr int kHeads = 3;
inline const std::vector<int> kLengths = {70, 0, 33, 5, 16, 1};

/// A cache whose requests hold `lengths` random tokens; pages hold NaN wherever nothing was appended.
inline Cache make_cache(const KvCacheSpec& spec, const std::vector<int>& lengths, std::uint64_t seed) {
  Random random(seed);
  Cache cache(spec, lengths, random);
  std::int64_t tokens = 0;
  for (const int n : lengths) tokens += n;
  const auto part = [&](Data data, int dim) {
    std::vector<float> values(static_cast<std::size_t>(tokens * spec.kv_heads * dim));
    fill(random, data, values, spec.kv_heads, dim);
    return Tensor::of(DType::kFloat32, {tokens, spec.kv_heads, dim}, values);
  };
  const Tensor k = part(Data::kOutlierChannels, spec.head_dim);
  const Tensor v = spec.is_latent() ? Tensor{} : part(Data::kNormal, spec.v_dim());
  if (!spec.is_latent()) cache.calibrate(k, v);
  cache.append(lengths, k, v);
  return cache;
}

struct Rows {
  Tensor k, v;
};

/// Outputs of bytes 0xFF: NaN.
inline Rows make_rows(const Cache& cache, DType type, std::int64_t rows) {
  return {Tensor(type, {rows, cache.spec.kv_heads, cache.spec.head_dim}),
          Tensor(type, {rows, cache.spec.kv_heads, cache.spec.v_dim()})};
}

inline Rows on_cpu(const Cache& cache, DType type) {
  Rows rows = make_rows(cache, type, cache.total_tokens());
  dequantize(cache.view(), rows.k.view(), rows.v.view());
  return rows;
}

}  // namespace halftone::testing
