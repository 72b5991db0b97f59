// Random caches and inputs for the tests of append and dequantize.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "format/head_dim.h"
#include "halftone/cache.h"
#include "reference/cache.h"
#include "reference/random.h"
#include "reference/tensor.h"

namespace halftone::testing {

using reference::Cache;
using reference::Data;
using reference::Random;
using reference::Tensor;

inline KvFormat random_format(Random& random, int dim) {
  for (;;) {
    KvFormat f;
    f.dtype = random.pick(
        std::array{DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kInt8, DType::kInt4});
    if (dtype_bits(f.dtype) == 16) return f;
    f.granularity = static_cast<Granularity>(random.integer(1, 5));
    f.asymmetric = f.dtype != DType::kFloat8E4M3 && random.chance(0.5);
    f.scale_dtype = f.static_scale() || random.chance(0.5) ? DType::kFloat32 : DType::kFloat16;
    if (f.granularity == Granularity::kGroup) f.group_size = random.pick(std::array{32, 64, 128});
    if (f.group_size == 0 || dim % f.group_size == 0) return f;
  }
}

inline KvCacheSpec random_spec(Random& random) {
  KvCacheSpec s;
  s.kv_heads = static_cast<int>(random.integer(1, 5));
  s.head_dim = random.pick(kHeadDims);
  s.v_head_dim = random.chance(0.5) ? random.pick(kHeadDims) : 0;
  s.page_size = random.pick(kPageSizes);
  s.k_format = random_format(random, s.head_dim);
  s.v_format = random_format(random, s.v_dim());
  s.rotate_k = random.chance(0.3);
  s.rotate_v = random.chance(0.3);
  return s;
}

/// Latent caches of every kind of scale, width and page.
inline std::vector<KvCacheSpec> latent_specs() {
  std::vector<KvCacheSpec> all;
  std::size_t n = 0;
  for (const char* format :
       {"fp8-g128-f32", "fp8-g32", "fp8-token-head", "int8-head", "int8-g64-asym-f32", "int8-g64",
        "int8-token", "int4-g32", "int4-g64", "int4-row", "int4-g128-sym-f32", "bf16", "fp16"}) {
    for (const int dim : kLatentDims) {
      for (const int rope : kRopeDims) {
        all.push_back(KvCacheSpec::latent(parse_format(format), dim, rope, kPageSizes[n++ % 5]));
      }
    }
  }
  for (const char* format : {"fp8-g64-e8m0", "int4-g64"}) {  // whose rotary dims are V, too
    for (const int page_size : kPageSizes) {
      all.push_back(KvCacheSpec::latent(parse_format(format), 448, 64, page_size, true));
    }
  }
  return all;
}

inline Tensor random_values(Random& random, int tokens, int heads, int dim, DType dtype = DType::kFloat32) {
  std::vector<float> x(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(heads * dim));
  fill(random, random.chance(0.5) ? Data::kOutlierChannels : Data::kNormal, x, heads, dim);
  return Tensor::of(dtype, {tokens, heads, dim}, x);
}

struct RopeTables {
  Tensor cos, sin, positions;
  RopeTables(Random& random, int tokens, int half) {
    constexpr int kRows = 64;
    std::vector<float> c, s;
    std::vector<std::int32_t> p;
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < half; ++i) {
        const double angle = row * std::pow(10000.0, -static_cast<double>(i) / half);
        c.push_back(static_cast<float>(std::cos(angle)));
        s.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    for (int t = 0; t < tokens; ++t) p.push_back(static_cast<std::int32_t>(random.integer(0, kRows - 1)));
    cos = Tensor::of(DType::kFloat32, {kRows, half}, c);
    sin = Tensor::of(DType::kFloat32, {kRows, half}, s);
    positions = Tensor::of({tokens}, p);
  }
  Rope rope(RopePairing pairing) const { return {pairing, cos.view(), sin.view(), positions.view()}; }
};

inline TensorView rows(const TensorView& t, std::int64_t first, std::int64_t count) {
  TensorView part = t;
  part.data = static_cast<std::uint8_t*>(t.data) + first * t.strides[0] * (dtype_bits(t.dtype) / 8);
  part.shape[0] = count;
  return part;
}

inline AppendArgs by_slots(const Tensor& k, const Tensor& v, const Tensor& slots, const Rope& rope) {
  AppendArgs args;
  args.k = k.view();
  args.v = v.view();
  args.slot_mapping = slots.view();
  args.rope = rope;
  return args;
}

}  // namespace halftone::testing
