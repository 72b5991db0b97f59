// A warpgroup that computes: 64 packed rows of an item against its keys, from the last tile to the first.
// While O takes up one tile's P and V, the next tile's Q K^T is on its way.
#pragma once

#include <type_traits>

#include "cuda/attention/logits.h"
#include "cuda/device/reduce.h"
#include "cuda/device/wgmma.h"
#include "cuda/prefill/load.h"
#include "cuda/prefill/softmax.h"

namespace halftone::cuda {

/// swizzled_matrix_of() of rows of so many bytes, swizzled over as many.
template <int kRowBytes>
__device__ inline std::uint64_t rows_matrix_of(std::uint32_t word) {
  if constexpr (kRowBytes == 128) return swizzled_matrix_of(word);
  constexpr std::uint64_t kSwizzle64 = 2, kEightRows = 512 / 16;
  return kSwizzle64 << 62 | kEightRows << 32 | word;
}

template <PrefillConfig C>
struct Consumer {
  using Traits = PrefillTraits<C>;
  using Item = typename Traits::Item;
  static constexpr int kValueDim = C.value_dim / C.shares;      // of the warpgroup
  static constexpr int kS = C.kv_tile / 2, kO = kValueDim / 2;  // registers of a lane
  static constexpr int kTiles = C.kv_tile / kTileTokens;
  static constexpr int kSteps = C.head_dim / (Traits::kCodes ? 32 : 16);  // of Q K^T, 32 bytes of a row each
  static constexpr bool kE4m3 = Traits::kE4m3;
  static constexpr DType kOperand = operand_of(C.keys, C.dtype);  // of Q K^T
  using Product = std::conditional_t<kOperand == DType::kInt8, std::int32_t, float>;
  using Products = Product[kS];  // of Q K^T
  // Beside a sum tensor cores keep few bits of products of E4M3, fewer the more dims it has: those of the
  // second half of long rows add up apart.
  static constexpr bool kTwoSums = kE4m3 && C.head_dim > 256;
  using Logits = float[kS];
  using Probabilities = std::uint32_t[kE4m3 ? kTiles / 2 : kTiles][4];

  const AttentionParams& p;
  typename Traits::Shared& s;
  std::uint32_t thread;   // of the block
  std::uint32_t queries;  // of the item, swizzled_word()
  float o[kO];
  RunningSoftmax<C> softmax;
  Product second[kTwoSums ? kS : 0];
  std::uint32_t kept[C.kept_steps][4];  // of Q, fragments of the first steps
  // Of the rows, where registers allow it: reading them anew costs each tile 4% of its time.
  float factors[Traits::kPacked ? 2 : 0];

  __device__ void locate() { thread = thread_index(); }
  __device__ int group() const { return thread / 128; }
  __device__ int warp() const { return thread / 32 % 4; }
  __device__ int lane() const { return thread % 32; }
  /// Which 64 rows of the item are the warpgroup's, and which part of the dims of V.
  __device__ int rows_index() const { return C.shares == 1 ? group() : thread / (128 * C.shares); }
  __device__ int share() const { return C.shares == 1 ? 0 : thread / 128 % C.shares; }
  /// Of thread `of`, the first of two packed rows, 8 apart.
  static __device__ int first_row(std::uint32_t of) {
    const std::uint32_t warp = C.shares == 1 ? of / 32 : of / (128 * C.shares) * 4 + of / 32 % 4;
    return warp * 16 + of % 32 / 4;
  }
  __device__ int first_row() const { return first_row(thread); }
  /// Where the warp keeps something for its rows apart from those that share them.
  __device__ int own_row() const { return thread / 32 * 16 + thread % 32 / 4; }

  __device__ void begin() {
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] = 0.0f;
    softmax = {};
  }

  /// Looked up anew beside E4M3, to keep no register.
  __device__ std::uint32_t query_word() const {
    if constexpr (!kE4m3) return queries;
    const volatile int& at = s.own[thread / 32].queries;
    return swizzled_word(shared_address(s.q) + at);
  }
  /// S = Q K^T of a stage; of kTwoSums x + second.
  __device__ void begin_scores(int stage, Products& x) {
    constexpr int kRow = Traits::kRowBytes, kKeyRow = Traits::kKeyRowBytes;
    const std::uint64_t q = rows_matrix_of<kRow>(uniform(query_word()));
    const std::uint64_t k = rows_matrix_of<kKeyRow>(
        uniform(swizzled_word(shared_address(s.k)) + stage * (Traits::kKeyTileBytes / 16)));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = 32 * step;  // bytes of a row
      const std::uint64_t a = q + (at / kRow * (64 * kRow / 16) + at % kRow / 16);
      const std::uint64_t b = k + (at / kKeyRow * (C.kv_tile * kKeyRow / 16) + at % kKeyRow / 16);
      if constexpr (kTwoSums) {
        if (step == kSteps / 2) wgmma_first<kOperand>(second, a, b);
        if (step > kSteps / 2) wgmma_add<kOperand>(second, a, b);
        if (step >= kSteps / 2) continue;
      }
      if constexpr (C.kept_steps > 0) {
        if (step == 0) wgmma_first<kOperand>(x, kept[step], b);
        if (step > 0 && step < C.kept_steps) wgmma_add<kOperand>(x, kept[step], b);
        if (step < C.kept_steps) continue;
      }
      if (step == 0) {
        wgmma_first<kOperand>(x, a, b);
      } else {
        wgmma_add<kOperand>(x, a, b);
      }
    }
    wgmma_commit();
  }
  /// Once they are complete.
  __device__ void join(Products& x) {
    pin(x);
    if constexpr (kTwoSums) {
      pin(second);
#pragma unroll
      for (int i = 0; i < kS; ++i) x[i] += second[i];
    }
  }
  /// O += P V of a stage; of E4M3 `anew`: O = P V.
  __device__ void begin_output(int stage, const Probabilities& prob, bool anew = false) {
    if constexpr (kE4m3) {
      constexpr int kStep = 2 * kTileTokens * C.value_dim;  // bytes
      static_assert(kStep % 16 == 0);
      const std::uint64_t v = b_matrix<C.value_dim>(0) + uniform((shared_address(s.v) & 0x3ffffu) / 16 +
                                                                 stage * (Traits::kValueTileBytes / 16) +
                                                                 share() * kValueDim);  // 16 bytes of a dim
#pragma unroll
      for (int i = 0; i < kTiles / 2; ++i) {
        wgmma_add_if<C.dtype, C.dtype>(i > 0 || !anew, o, prob[i], v + i * (kStep / 16));
      }
      wgmma_commit();
      return;
    } else {
      begin_wide_output(stage, prob);
    }
  }
  __device__ void begin_wide_output(int stage, const Probabilities& prob) {
    constexpr int kRow = Traits::kRowBytes;
    const std::uint64_t v = rows_matrix_of<kRow>(uniform(
        swizzled_word(shared_address(s.v), C.kv_tile * kRow) + stage * (Traits::kValueTileBytes / 16) +
        share() * (Traits::kValueTileBytes / C.shares / 16)));
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      wgmma_add<C.dtype, C.dtype, true>(o, prob[i], v + i * (16 * kRow / 16));
    }
    wgmma_commit();
  }

  /// What products of row g + 8 r are multiplied by.
  __device__ float factor(int r) const {
    if constexpr (Traits::kPacked) return factors[r];
    if constexpr (Traits::kStaged) return s.query_factors[first_row() + 8 * r];
    return p.scale_log2;
  }
  /// Products of a stage become logits, but for that factor; `scaled`: the keys have scales.
  __device__ void take(const Products& products, Logits& x, int stage, bool scaled) const {
#pragma unroll
    for (int i = 0; i < kS; ++i) x[i] = static_cast<float>(products[i]);
    if constexpr (Traits::kStaged) {
      if (scaled) multiply_by_keys(x, stage);
    }
  }
  /// By the scale of each key.
  __device__ void multiply_by_keys(Logits& x, int stage) const {
#pragma unroll
    for (int i = 0; i < kS / 4; ++i) {
      const float2 scale = *reinterpret_cast<const float2*>(s.key_scales[stage] + 8 * i + thread % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * i + e] *= e % 2 ? scale.y : scale.x;
    }
  }

  __device__ float slope_of(const Item& item, int row) const {
    if (p.alibi_slopes == nullptr) return 0.0f;
    if constexpr (Traits::kKeepsSlopes) return item.slope[row];
    const int last = item.item.work.row_end - item.item.work.row_begin - 1;
    return cuda::slope_of(p, place_of(p, item.item, min(row, last)).head);
  }
  /// Products become base-2 logits, capped and biased: four at a time, since few registers are free.
  __device__ void cap_and_bias(Logits& x, const Item& item, int token) const {
    const Softcap cap(p);
    const int row = first_row();
    const float slope[2] = {slope_of(item, row), slope_of(item, row + 8)};
#pragma unroll
    for (int i = 0; i < kS / 4; ++i) {
      float(&four)[4] = reinterpret_cast<float(&)[4]>(x[4 * i]);
      pin(four);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        four[e] *= factor(e / 2);
        if (p.softcap > 0.0f) four[e] = cap(four[e]);
        const int away = item.position[row + e / 2 * 8] - (token + 8 * i + thread % 4 * 2 + e % 2);
        if (p.alibi_slopes != nullptr) four[e] = biased(four[e], slope[e / 2], away);
      }
      pin(four);
    }
  }
  /// Of a lane's columns in a tile, 8 i and 8 i + 1, how many lie before key `end`, counted from the first.
  static __device__ int columns_before(int end) {
    const auto before = static_cast<std::uint32_t>(min(max(end, 0), C.kv_tile));
    return before / 8 * 2 + min(before % 8, 2u);
  }
  /// Hides what rows do not see: a bit for each of the lane's columns.
  __device__ void mask(Logits& x, const Item& item, int token, std::uint32_t live) const {
    static_assert(kS / 2 < 64);
    using Columns = std::conditional_t<(kS / 2 < 32), std::uint32_t, std::uint64_t>;
    const int column = token + thread % 4 * 2;
    Columns missing = 0;  // in tiles of 16 tokens that are not there
    if (live != (1u << kTiles) - 1) {
#pragma unroll 1
      for (int i = 0; i < kTiles; ++i) missing |= (live >> i & 1) ? Columns{0} : Columns{0xf} << 4 * i;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const VisibleKeys seen(p, item.position[first_row() + 8 * r], item.item.work.kv_end);
      const int end = seen.count == 0 ? 0 : seen.last + 1 - column;
      constexpr Columns kOne = 1;
      const Columns hidden =
          missing | ~((kOne << columns_before(end)) - 1) | ((kOne << columns_before(seen.from - column)) - 1);
#pragma unroll
      for (int i = 0; i < kS / 2; ++i) {
        if (hidden >> i & 1) x[i / 2 * 4 + 2 * r + i % 2] = kMinus;
      }
    }
  }

  /// Where a lane finds its part of the warp's rows of Q.
  __device__ std::uint32_t query_place() const {
    const std::uint32_t at = thread_index();  // read anew: nothing of this is worked out ahead
    return shared_address(s.q) + s.own[at / 32].queries +
           (at / 32 % 4 * 16 + at % 32 / 8 % 2 * 8 + at % 8) * Traits::kRowBytes;
  }
  /// A step's fragment of them, of which mma and wgmma take the same.
  __device__ void load_query(std::uint32_t place, int step, std::uint32_t (&a)[4]) const {
    constexpr int kChunkSteps = Traits::kRowBytes / 32;
    const std::uint32_t at = thread_index();
    load_matrices(place + step / kChunkSteps * (64 * Traits::kRowBytes) +
                      Traits::Place::piece(at % 8, step % kChunkSteps * 2 + at % 32 / 16),
                  a);
  }
  /// Of an item, whose queries are there.
  __device__ void keep_queries() {
    if constexpr (C.kept_steps > 0) {
      const std::uint32_t place = query_place();
#pragma unroll
      for (int step = 0; step < C.kept_steps; ++step) load_query(place, step, kept[step]);
    }
  }

  /// S = Q K^T of a stage once more, of this warp's rows: other warps need not agree to mma.
  __device__ void repeat_scores(int stage, Products& x) const {
    constexpr int kKeyRow = Traits::kKeyRowBytes, kKeyChunkSteps = kKeyRow / 32;
    const std::uint32_t at = thread_index();
    const std::uint32_t matrix = at % 32 / 8, row = at % 8;
    const std::uint32_t q = query_place();
    const std::uint32_t k = shared_address(s.k[stage]) + (matrix / 2 * 8 + row) * kKeyRow;
#pragma unroll
    for (int i = 0; i < kS; ++i) x[i] = 0;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const int key_piece = step % kKeyChunkSteps * 2;
      const std::uint32_t keys = k + step / kKeyChunkSteps * (C.kv_tile * kKeyRow) +
                                 Traits::KeyPlace::piece(row, key_piece + matrix % 2);
      std::uint32_t a[4];
      load_query(q, step, a);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        std::uint32_t b[4];
        load_matrices(keys + i * (16 * kKeyRow), b);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Product(&to)[4] = reinterpret_cast<Product(&)[4]>(x[8 * i + 4 * half]);
          if constexpr (kOperand == DType::kFloat8E4M3) {
            mma_e4m3(to, a, b[2 * half], b[2 * half + 1]);
          } else if constexpr (kOperand == DType::kInt8) {
            mma_s8(to, a, b[2 * half], b[2 * half + 1]);
          } else if constexpr (kOperand == DType::kBFloat16) {
            mma_bf16(to, a, b[2 * half], b[2 * half + 1]);
          } else {
            mma_f16(to, a, b[2 * half], b[2 * half + 1]);
          }
        }
      }
    }
  }

  /// Raises the offsets of rows with a larger logit in the tile, by whole powers of two: O and the sum are
  /// scaled without rounding.
  __device__ void raise(const Logits& x, const float (&factor)[2]) {
    float most[2] = {x[0], x[2]};
    bool raised = false;
#pragma unroll
    for (int i = 0; i < kS; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], x[i]);
    using Softmax = RunningSoftmax<C>;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = largest_of_lanes<1, 4>(most[r]);
      float up = 0.0f;
      const float offset = fmaf(most[r], factor[r], -Softmax::kFirstLog2);
      if (softmax.empty(r)) {  // O and the sum are 0
        softmax.offset[r] = fmaxf(offset, softmax.offset[r]);
      } else if (offset > softmax.offset[r]) {
        up = fminf(ceilf(offset - softmax.offset[r]), Softmax::kMostRaised);
        softmax.offset[r] = up < Softmax::kMostRaised ? softmax.offset[r] + up : offset;
        softmax.sum[r] *= exp2_approx(-up);
        raised = true;
      }
      if (thread % 4 == 0) s.raised_log2[own_row() + 8 * r] = static_cast<std::int8_t>(up);
    }
    if (__any_sync(~0u, raised) && thread % 32 == 0) s.own[thread / 32].step = Traits::OwnTiles::kRaised;
    __syncwarp();
  }
  /// What O takes part in of that, once it is complete.
  __device__ void rescale_output() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float rescale = exp2_approx(-static_cast<float>(s.raised_log2[own_row() + 8 * r]));
#pragma unroll
      for (int i = 0; i < kO / 2; ++i) o[i / 2 * 4 + 2 * r + i % 2] *= rescale;
    }
    __syncwarp();
  }
  /// P, not yet rounded; `sum`: of the lane's columns.
  __device__ void exponentiate(Logits& x, const float (&factor)[2], float (&sum)[2]) const {
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kS; ++i) {
      const int r = i / 2 % 2;
      x[i] = exp2_approx(fmaf(x[i], factor[r], -softmax.offset[r]));
      sum[r] += x[i];
    }
  }
  /// The same, from the products of a tile without mask or modifiers.
  __device__ void exponentiate_plain(Products& products, int stage, Logits& x, float (&sum)[2]) const {
    const bool scaled = Traits::kCodes && s.live[stage] & kScaledTile;
    if constexpr (Traits::kPacked) {
      exponentiate_plain<Traits::kScaledLogits>(products, stage, x, sum, true);
    } else if constexpr (kE4m3) {  // fewer registers than with scales of its own
      if (scaled) multiply_by_keys(products, stage);
      exponentiate_plain<false>(products, stage, x, sum, scaled);
    } else if (scaled) {
      exponentiate_plain<Traits::kCodes>(products, stage, x, sum, true);
    } else {
      exponentiate_plain<false>(products, stage, x, sum, false);
    }
  }
  /// `kScaled`: each key has a scale; scales and exponents of one logit then come beside the exponential of
  /// another.
  template <bool kScaled>
  __device__ void exponentiate_plain(const Products& products, int stage, Logits& x, float (&sum)[2],
                                     bool scaled) const {
    float row[2] = {factor(0), factor(1)};
    if constexpr (Traits::kCodes && !kScaled) {
      const float all = scaled ? 1.0f : s.key_scales[stage][0];
      row[0] *= all, row[1] *= all;
    }
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kS / 4; ++i) {
      float2 key = {1.0f, 1.0f};
      if constexpr (kScaled) {
        key = *reinterpret_cast<const float2*>(s.key_scales[stage] + 8 * i + thread % 4 * 2);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scale = (e % 2 ? key.y : key.x) * row[e / 2];
        x[4 * i + e] =
            exp2_approx(fmaf(static_cast<float>(products[4 * i + e]), scale, -softmax.offset[e / 2]));
        sum[e / 2] += x[4 * i + e];
      }
    }
  }
  /// Whether the tile needs larger offsets, of any row of the warp; also where a product was not a number.
  __device__ static bool exceeds(const float (&sum)[2]) {
    constexpr float kLargest = RunningSoftmax<C>::kLargestSum;
    return __any_sync(~0u, !(sum[0] <= kLargest && sum[1] <= kLargest));
  }
  /// Whether Q K^T must be looked at again, for the item's own rows: those of another request, whose results
  /// nobody wants, must not change their bits. A finite sum can be lowered, where the type of P is.
  __device__ static bool must_repeat(const float (&sum)[2], const Item& item) {
    const auto beyond = [](float x) {
      using Softmax = RunningSoftmax<C>;
      return Softmax::kLowers ? !(x < HUGE_VALF) : !(x <= Softmax::kLargestSum);
    };
    const int first = first_row(thread_index());  // anew: registers are few
    const int left = item.item.work.row_end - item.item.work.row_begin - first;
    return __any_sync(~0u, (left > 0 && beyond(sum[0])) || (left > 8 && beyond(sum[1])));
  }
  /// Lowers P of rows whose sums are more than its type takes by powers of two, and the sum and O with it: as
  /// if their offsets had been larger, without rounding.
  __device__ void lower(Logits& x, float (&sum)[2]) {
    using Softmax = RunningSoftmax<C>;
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most = largest_of_lanes<1, 4>(sum[r]);
      const int log2 = static_cast<int>(__float_as_uint(most) >> 23) - 127;
      const int up = most > Softmax::kLargestSum ? log2 - Softmax::kLoweredLog2 : 0;
      scale[r] = power_of_two(-up);
      softmax.offset[r] += static_cast<float>(up);
      softmax.sum[r] *= scale[r], sum[r] *= scale[r];
      if (thread % 4 == 0) s.raised_log2[own_row() + 8 * r] = static_cast<std::int8_t>(up);
    }
#pragma unroll
    for (int i = 0; i < kS; ++i) x[i] *= scale[i / 2 % 2];
    __syncwarp();
    wgmma_wait<0>();  // O has taken in the tile before
    rescale_output();
  }
  __device__ void add(const float (&sum)[2]) { softmax.sum[0] += sum[0], softmax.sum[1] += sum[1]; }
  __device__ static void round(const Logits& x, Probabilities& prob) {
    if constexpr (kE4m3) {
#pragma unroll
      for (int i = 0; i < kS / 4; ++i) {  // a row's four columns of a tile of 16 tokens: value_tiles.h
        const float* own = x + i / 2 * 8 + i % 2 * 2;
        prob[i / 4][i % 4] = pack_e4m3x4(own[0], own[1], own[4], own[5]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kS / 2; ++i) {
        prob[i / 4][i % 4] = C.dtype == DType::kBFloat16 ? pack_bf16x2(x[2 * i], x[2 * i + 1])
                                                         : pack_f16x2(x[2 * i], x[2 * i + 1]);
      }
    }
  }
  /// Zeroes V of tokens that the request does not have: P is 0 there, but 0 times what lies there may be NaN.
  __device__ void clear_dead(int stage, int alive) {
    constexpr int kPieces = Traits::Place::kPieces;
    uint4* rows = reinterpret_cast<uint4*>(s.v[stage]);
    if constexpr (kE4m3) {  // whole tiles of 16 tokens; staged ones end with zeros
      const int first = (max(alive, 0) + kTileTokens - 1) / kTileTokens * C.value_dim;
#pragma unroll 1
      for (int i = first + static_cast<int>(thread % 128); i < kTiles * C.value_dim; i += 128)
        rows[i] = uint4{};
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < Traits::kValueChunks; ++chunk) {
#pragma unroll 1
        for (int i = max(alive, 0) * kPieces + static_cast<int>(thread % 128); i < C.kv_tile * kPieces;
             i += 128) {
          rows[chunk * (C.kv_tile * kPieces) + i] = uint4{};
        }
      }
    }
    fence_async_shared();
    team_barrier(group());
  }

  __device__ void release(std::uint64_t& barrier) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&barrier));
  }
};

/// A barrier among the warpgroups that have the same rows.
template <PrefillConfig C>
__device__ inline void shared_rows_barrier(const Consumer<C>& c) {
  if constexpr (C.shares == 1) {
    team_barrier(c.group());
  } else {
    teams_barrier<C.shares>(C.warpgroups + c.rows_index());
  }
}

}  // namespace halftone::cuda
