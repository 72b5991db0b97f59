// K of packed formats as columns: column c of a chunk holds, for each of its 64 tokens, dword c of the
// token's codes. Lanes are then tokens, so that dot products need no sum over lanes and scales are ordinary
// vectors, and the codes of a dword are taken out by masks.

#include <bit>
#include <utility>

#include "cpu/tiles.h"
#include "cpu/vec-inl.h"

#if defined(HALFTONE_CPU_COLUMNS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_COLUMNS_INL_H
#undef HALFTONE_CPU_COLUMNS_INL_H
#else
#define HALFTONE_CPU_COLUMNS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

// --- Codes of a dword

/// column_code() gives code k times 2^column_exponent().
template <Element kElement>
constexpr int column_exponent(int k) {
  if (kElement == Element::kI8) return 24;
  if (kElement == Element::kU8) return k == 3 ? 16 : 8 * k;
  if (kElement == Element::kU4) return k == 7 ? 24 : 4 * k;
  if (kElement == Element::kI4) return 4 * k;
  return 0;
}
inline int column_exponent(Element element, int k) {
  return element == Element::kI8   ? column_exponent<Element::kI8>(k)
         : element == Element::kU8 ? column_exponent<Element::kU8>(k)
         : element == Element::kU4 ? column_exponent<Element::kU4>(k)
         : element == Element::kI4 ? column_exponent<Element::kI4>(k)
                                   : 0;
}

/// Code k of each lane's dword; asymmetric codes less the zero point `zero`, which is scaled alike. An e4m3
/// NaN gives
/// +-480: see nan_carry().
template <Element kElement, int k>
HWY_INLINE VF column_code(VI dword, const std::int32_t* zero) {
  const F d;
  const I di;
  if constexpr (kElement == Element::kI8) {
    const VI top = k == 3 ? dword : hn::ShiftLeft<24 - 8 * k>(dword);
    return hn::ConvertTo(d, k == 0 ? top : hn::And(top, hn::Set(di, static_cast<std::int32_t>(0xff000000u))));
  } else if constexpr (kElement == Element::kE4M3) {
    // Sign, exponent and mantissa in the places of fp32's make the value times 2^-120.
    const VI top = k == 3 ? dword : hn::ShiftLeft<24 - 8 * k>(dword);
    const VI bits = hn::And(hn::ShiftRight<4>(top), hn::Set(di, static_cast<std::int32_t>(0x87f00000u)));
    return hn::Mul(hn::BitCast(d, bits), hn::Set(d, 0x1p120f));
  } else {
    constexpr int kWidth = four_bits(kElement) ? 4 : 8;
    constexpr bool kTop = k == 32 / kWidth - 1;
    constexpr std::uint32_t kMask = (1u << kWidth) - 1;
    if constexpr (kElement == Element::kI4) {
      const VI nibble = hn::And(dword, hn::Set(di, static_cast<std::int32_t>(kMask << (4 * k))));
      return hn::ConvertTo(d, hn::Sub(nibble, hn::Set(di, static_cast<std::int32_t>(8u << (4 * k)))));
    } else {  // the top code moves down, away from the sign
      constexpr int kShift = kWidth * (kTop ? k - 1 : k);
      const VI code = hn::And(kTop ? hn::ShiftRight<kWidth>(dword) : dword,
                              hn::Set(di, static_cast<std::int32_t>(kMask << kShift)));
      return hn::ConvertTo(d, hn::Sub(code, hn::LoadU(di, zero)));
    }
  }
}

/// Sets the top bit of each byte of an e4m3 dword that is 0x7f or 0xff; other bits are arbitrary.
HWY_INLINE VI nan_carry(VI dword) {
  const I d;
  return hn::Add(hn::And(dword, hn::Set(d, 0x7f7f7f7f)), hn::Set(d, 0x01010101));
}
HWY_INLINE hn::Mask<F> any_carry(VI carry) {
  const I d;
  const VI top = hn::And(carry, hn::Set(d, static_cast<std::int32_t>(0x80808080u)));
  return hn::RebindMask(F(), hn::Ne(top, hn::Zero(d)));
}

// --- Transposition

#if HWY_TARGET != HWY_SCALAR
/// N dwords of which each block of four comes from a row; rows of neighbouring blocks are four apart.
template <int N>
HWY_INLINE auto load_blocks(const std::uint8_t* p, std::int64_t stride) {
  const hn::CappedTag<std::int32_t, N> d;
  if constexpr (N == 4) {
    return hn::LoadU(d, reinterpret_cast<const std::int32_t*>(p));
  } else {
    return hn::Combine(d, load_blocks<N / 2>(p + N / 2 * stride, stride), load_blocks<N / 2>(p, stride));
  }
}
#endif

/// Transposes 16 rows of `columns` dwords, `stride` bytes apart, into columns of kChunkTokens dwords. Reads
/// up to 12 bytes beyond a row.
HWY_INLINE void transpose_rows(const std::uint8_t* rows, std::int64_t stride, int columns,
                               std::int32_t* out) {
#if HWY_TARGET == HWY_SCALAR
  for (int t = 0; t < kTileTokens; ++t) {
    for (int c = 0; c < columns; ++c) {
      std::memcpy(out + c * kChunkTokens + t, rows + t * stride + c * 4, sizeof(std::int32_t));
    }
  }
#else
  const I d;
  const hn::RepartitionToWide<I> pair;
  for (int piece = 0; piece < columns; piece += 4) {
    for (int first = 0; first < kTileTokens; first += kLanes) {
      VI v[4];  // block b of v[i]: token first + 4 b + i
      HALFTONE_UNROLL
      for (int i = 0; i < 4; ++i) v[i] = load_blocks<kLanes>(rows + (first + i) * stride + piece * 4, stride);
      const auto low01 = hn::BitCast(pair, hn::InterleaveLower(d, v[0], v[1]));
      const auto low23 = hn::BitCast(pair, hn::InterleaveLower(d, v[2], v[3]));
      const auto high01 = hn::BitCast(pair, hn::InterleaveUpper(d, v[0], v[1]));
      const auto high23 = hn::BitCast(pair, hn::InterleaveUpper(d, v[2], v[3]));
      std::int32_t* to = out + piece * kChunkTokens + first;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pair, low01, low23)), d, to);
      if (piece + 1 < columns) {
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pair, low01, low23)), d, to + kChunkTokens);
      }
      if (piece + 2 < columns) {
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pair, high01, high23)), d, to + 2 * kChunkTokens);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pair, high01, high23)), d, to + 3 * kChunkTokens);
      }
    }
  }
#endif
}

/// All K data of a tile.
HWY_INLINE void transpose_tile(const KMap& map, const std::uint8_t* data, std::int32_t* out) {
  for (const KSection& section : map.sections) {
    transpose_rows(data + section.offset, section.stride, section.columns, out);
    out += section.columns * kChunkTokens;
  }
}

// --- Scales

/// Scales and mins of K with tokens in the lanes. A min enters through a zero point: x = (code - c) * scale +
/// offset with an integer c near -min / scale and offset = c * scale + min. Where 0 lies between a group's
/// extremes, |offset| is at most scale / 2, so that nothing cancels; elsewhere code * scale and offset have
/// the same sign.
struct KParams {
  const float* scale;        // [group][kChunkTokens]
  const float* offset;       // [group][kChunkTokens]; asymmetric
  const std::int32_t* zero;  // [group][code][kChunkTokens]: c * 2^column_exponent(); asymmetric
};

/// From scale and min of kLanes tokens of a group to offset and zero points.
HWY_INLINE void store_zero_point(Element element, const float* scale, float* min, std::int32_t* zero) {
  const F d;
  const int codes = four_bits(element) ? 8 : 4;
  const VF s = hn::LoadU(d, scale), m = hn::LoadU(d, min);
  const VF wish = hn::Neg(hn::Div(m, s));
  const VF positive = hn::IfThenElseZero(hn::Gt(wish, hn::Zero(d)), wish);  // also where it is NaN
  const VF c = hn::Round(hn::Min(positive, hn::Set(d, four_bits(element) ? 15.0f : 255.0f)));
  hn::StoreU(hn::MulAdd(c, s, m), d, min);
  const VI integer = hn::ConvertTo(I(), c);
  for (int k = 0; k < codes; ++k) {
    hn::StoreU(hn::ShiftLeftSame(integer, column_exponent(element, k)), I(), zero + k * kChunkTokens);
  }
}

/// Stored params of tile `index` of a chunk. scale and min: [group][kChunkTokens]; min receives the offsets.
HWY_INLINE void load_k_params(const Side& side, const std::uint8_t* params, int index, float* scale,
                              float* min, std::int32_t* zero) {
  if (!side.stored_params) return;
  const int count = kTileTokens * side.groups, at = index * kTileTokens;
  const auto load = [&](const std::uint8_t* from, float* to) HWY_ATTR {
    if (side.groups == 1) {
      load_params(side.f32_params, from, count, to + at);
      return;
    }
    HWY_ALIGN float rows[kTileTokens * kMaxGroups + kMaxLanes];
    load_params(side.f32_params, from, count, rows);
    transpose_rows(reinterpret_cast<const std::uint8_t*>(rows), side.groups * 4, side.groups,
                   reinterpret_cast<std::int32_t*>(to + at));
  };
  load(params, scale);
  if (!side.has_min) return;
  load(params + count * (side.f32_params ? 4 : 2), min);
  const int codes = four_bits(side.element) ? 8 : 4;
  for (int g = 0; g < side.groups; ++g) {
    for (int t = at; t < at + kTileTokens; t += kLanes) {
      store_zero_point(side.element, scale + g * kChunkTokens + t, min + g * kChunkTokens + t,
                       zero + g * codes * kChunkTokens + t);
    }
  }
}

/// The same for all tokens of a chunk if scales are static.
HWY_INLINE void fill_k_params(const Side& side, int kv_head, float* scale, float* min, std::int32_t* zero) {
  fill_static(side, kv_head, scale, min);
  if (side.static_scale == nullptr || !side.has_min) return;
  for (int t = 0; t < kChunkTokens; t += kLanes) store_zero_point(side.element, scale + t, min + t, zero + t);
}

// --- Dot products

struct ColumnArgs {
  const KMap* map;
  const std::int32_t* columns;  // [column][kChunkTokens], in the order of the tile
  const float* q;               // [column of the map][code][R], divided by 2^column_exponent()
  const float* q_sums;          // [block][R]; asymmetric
  KParams params;
  float* dots;  // [R][kChunkTokens]
  Prefetcher* prefetcher;
};

/// One code of V vectors of tokens against R rows.
template <Element kElement, int k, int R, int V>
HWY_INLINE void add_code(const VI (&dword)[V], const float* q, const std::int32_t* zero, VF (&acc)[R][V]) {
  VF code[V];
  HALFTONE_UNROLL
  for (int v = 0; v < V; ++v)
    code[v] = column_code<kElement, k>(dword[v], zero + k * kChunkTokens + v * kLanes);
  HALFTONE_UNROLL
  for (int r = 0; r < R; ++r) {
    const VF x = hn::Set(F(), q[k * R + r]);
    HALFTONE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = hn::MulAdd(x, code[v], acc[r][v]);
  }
}

template <Element kElement, int R, int V, int... k>
HWY_INLINE void add_codes(const VI (&dword)[V], const float* q, const std::int32_t* zero, VF (&acc)[R][V],
                          std::integer_sequence<int, k...>) {
  (add_code<kElement, k>(dword, q, zero, acc), ...);
}

/// Scaled dot products of R rows with a chunk.
template <Element kElement, int R>
HWY_NOINLINE void qk_columns(const ColumnArgs& a) {
  constexpr int kCodes = four_bits(kElement) ? 8 : 4;
  constexpr int kWish = kAccumulators / R, kVectors = kChunkTokens / kLanes;
  constexpr int V = kWish > kVectors ? kVectors : kWish > 4 ? 4 : kWish;
  const F d;
  for (int token = 0; token < kChunkTokens; token += V * kLanes) {
    const float* q = a.q;
    const std::int32_t* order = a.map->order.data();
    VI carry[V];
    HALFTONE_UNROLL
    for (int v = 0; v < V; ++v) carry[v] = hn::Zero(I());
    for (int b = 0; b < a.map->blocks; ++b) {
      const int group = b * a.map->groups / a.map->blocks;
      VF acc[R][V];
      HALFTONE_UNROLL
      for (int i = 0; i < R * V; ++i) acc[i / V][i % V] = hn::Zero(d);
      const std::int32_t* zero = a.params.zero + group * kCodes * kChunkTokens + token;
      for (int c = 0; c < a.map->block_columns; ++c, ++order, q += kCodes * R) {
        a.prefetcher->advance();
        VI dword[V];
        HALFTONE_UNROLL
        for (int v = 0; v < V; ++v) {
          dword[v] = hn::LoadU(I(), a.columns + *order * kChunkTokens + token + v * kLanes);
          if constexpr (kElement == Element::kE4M3) carry[v] = hn::Or(carry[v], nan_carry(dword[v]));
        }
        add_codes<kElement>(dword, q, zero, acc, std::make_integer_sequence<int, kCodes>());
      }
      const float* scale = a.params.scale + group * kChunkTokens + token;
      const float* offset = a.params.offset + group * kChunkTokens + token;
      HALFTONE_UNROLL
      for (int i = 0; i < R * V; ++i) {
        const int r = i / V, v = i % V;
        float* dots = a.dots + r * kChunkTokens + token + v * kLanes;
        VF sum = b == 0 ? hn::Zero(d) : hn::LoadU(d, dots);
        if constexpr (asymmetric(kElement)) {
          sum = hn::MulAdd(hn::LoadU(d, offset + v * kLanes), hn::Set(d, a.q_sums[b * R + r]), sum);
        }
        sum = hn::MulAdd(acc[r][v], hn::LoadU(d, scale + v * kLanes), sum);
        if constexpr (kElement == Element::kE4M3) {
          sum = hn::IfThenElse(any_carry(carry[v]), hn::Set(d, __builtin_nanf("")), sum);
        }
        hn::StoreU(sum, d, dots);
      }
    }
  }
}

using ColumnFunction = void (*)(const ColumnArgs&);

template <Element kElement>
ColumnFunction qk_columns_of(int rows) {
  return rows == 4 ? qk_columns<kElement, 4> : rows == 2 ? qk_columns<kElement, 2> : qk_columns<kElement, 1>;
}

// --- Values

/// Code after code of a chunk as values, [column of the map][code][kChunkTokens].
template <Element kElement, int... k>
HWY_INLINE void decode_dword(VI dword, VF scale, VF offset, const std::int32_t* zero, float* out,
                             std::integer_sequence<int, k...>) {
  const F d;
  (hn::StoreU(hn::MulAdd(hn::Mul(column_code<kElement, k>(dword, zero + k * kChunkTokens),
                                 hn::Set(d, 1.0f / static_cast<float>(1u << column_exponent<kElement>(k)))),
                         scale, offset),
              d, out + k * kChunkTokens),
   ...);
}

template <Element kElement>
HWY_NOINLINE void decode_columns(const KMap& map, const std::int32_t* columns, const KParams& params,
                                 float* out) {
  constexpr int kCodes = four_bits(kElement) ? 8 : 4;
  const F d;
  const std::int32_t* order = map.order.data();
  VI carry[kChunkTokens / kLanes];
  for (VI& c : carry) c = hn::Zero(I());
  for (int b = 0; b < map.blocks; ++b) {
    const int row = b * map.groups / map.blocks * kChunkTokens;
    for (int c = 0; c < map.block_columns; ++c, ++order) {
      float* to = out + (b * map.block_columns + c) * kCodes * kChunkTokens;
      for (int t = 0; t < kChunkTokens; t += kLanes) {
        const VI dword = hn::LoadU(I(), columns + *order * kChunkTokens + t);
        if constexpr (kElement == Element::kE4M3)
          carry[t / kLanes] = hn::Or(carry[t / kLanes], nan_carry(dword));
        const VF offset = asymmetric(kElement) ? hn::LoadU(d, params.offset + row + t) : hn::Zero(d);
        decode_dword<kElement>(dword, hn::LoadU(d, params.scale + row + t), offset,
                               params.zero + row * kCodes + t, to + t,
                               std::make_integer_sequence<int, kCodes>());
      }
    }
  }
  if constexpr (kElement == Element::kE4M3) {  // one NaN in a token makes its logits NaN
    for (int t = 0; t < kChunkTokens; t += kLanes) {
      const VF x = hn::LoadU(d, out + t);
      hn::StoreU(hn::IfThenElse(any_carry(carry[t / kLanes]), hn::Set(d, __builtin_nanf("")), x), d, out + t);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_COLUMNS_INL_H
