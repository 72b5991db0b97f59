// Direct path: sums of p * v over the tiles of a chunk, on the codes of V as they lie.
//
// Lanes of an accumulator hold partial sums over some of the tokens; they are added up once per item. Every
// product needs p (with the token's scale, if V is symmetric) in the lane of its token: the patterns.

#include "cpu/tiles.h"
#include "cpu/vec-inl.h"

#if defined(HALFTONE_CPU_PV_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_PV_INL_H
#undef HALFTONE_CPU_PV_INL_H
#else
#define HALFTONE_CPU_PV_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// How codes become values. kAffine: code * scale + min first, since a min that enters through sum(p) * min
/// would cancel against sum(p * code * scale). The others keep bare codes; scales are in p.
enum class PvMode : std::uint8_t { kCodes, kAffine };

struct PvArgs {
  const VMap* map;
  const VClass* cls;
  const Chunk* chunk;
  const float* p;      // packed: [tile][step][R][N]; row order: [R][kChunkTokens]
  const float* scale;  // kAffine: [tile][step][N]
  const float* min;
  const float* alpha;  // [R], or null if all are 1
  float bias;
  float* acc;  // [accumulator][plane][R][N]
};

/// kSelect: where p is 0 the value does not count, whatever it is (a NaN in a slot that the row must not
/// see).
template <Element kElement, int R, PvMode kMode, bool kSelect, int A>
HWY_INLINE void pv_block(const PvArgs& a, int first) {
  constexpr int P = planes_of(kElement);
  const F d;
  const Decoder<kElement> decoder(a.bias);
  VF acc[A][P][R];
  float* memory = a.acc + first * (P * R * kLanes);
  HALFTONE_UNROLL
  for (int i = 0; i < A * P * R; ++i) {
    acc[i / (P * R)][i / R % P][i % R] = hn::LoadU(d, memory + i * kLanes);
  }
  if (a.alpha != nullptr) {
    HALFTONE_UNROLL
    for (int i = 0; i < A * P * R; ++i) {
      VF& x = acc[i / (P * R)][i / R % P][i % R];
      x = hn::Mul(x, hn::Set(d, a.alpha[i % R]));
    }
  }
  std::int32_t base[A];
  HALFTONE_UNROLL
  for (int i = 0; i < A; ++i) base[i] = a.map->base[first + i];
  const int steps = row_order(kElement) ? kTileTokens : static_cast<int>(a.cls->steps.size());
  for (int tile = 0; tile < a.chunk->tiles; ++tile) {
    const std::uint8_t* data = a.chunk->tile[tile].v;
    for (int step = 0; step < steps; ++step) {
      VF p[R];
      if constexpr (row_order(kElement)) {
        HALFTONE_UNROLL
        for (int r = 0; r < R; ++r) p[r] = hn::Set(d, a.p[r * kChunkTokens + tile * kTileTokens + step]);
      } else {
        HALFTONE_UNROLL
        for (int r = 0; r < R; ++r) p[r] = hn::LoadU(d, a.p + ((tile * steps + step) * R + r) * kLanes);
      }
      const std::uint8_t* at =
          data + (row_order(kElement) ? step * a.chunk->tile[tile].v_stride : a.cls->steps[step].offset);
      HALFTONE_UNROLL
      for (int i = 0; i < A; ++i) {
        VF value[P];
        decoder.load(at + base[i], value);
        HALFTONE_UNROLL
        for (int plane = 0; plane < P; ++plane) {
          if constexpr (kMode == PvMode::kAffine) {
            value[plane] = hn::MulAdd(value[plane], hn::LoadU(d, a.scale + (tile * steps + step) * kLanes),
                                      hn::LoadU(d, a.min + (tile * steps + step) * kLanes));
          }
          HALFTONE_UNROLL
          for (int r = 0; r < R; ++r) {
            const VF v = kSelect ? hn::IfThenElseZero(hn::Ne(p[r], hn::Zero(d)), value[plane]) : value[plane];
            acc[i][plane][r] = hn::MulAdd(p[r], v, acc[i][plane][r]);
          }
        }
      }
    }
  }
  HALFTONE_UNROLL
  for (int i = 0; i < A * P * R; ++i) {
    hn::StoreU(acc[i / (P * R)][i / R % P][i % R], d, memory + i * kLanes);
  }
}

template <Element kElement, int R, PvMode kMode, bool kSelect>
HWY_NOINLINE void pv_class(const PvArgs& a) {
  constexpr int kWish = kAccumulators / (R * planes_of(kElement));
  constexpr int A = kWish < 1 ? 1 : kWish > 8 ? 8 : kWish;
  const int end = a.cls->first + a.cls->count;
  int first = a.cls->first;
  for (; first + A <= end; first += A) pv_block<kElement, R, kMode, kSelect, A>(a, first);
  if constexpr (A > 1) {
    for (; first < end; ++first) pv_block<kElement, R, kMode, kSelect, 1>(a, first);
  }
}

using PvFunction = void (*)(const PvArgs&);

template <Element kElement, PvMode kMode, bool kSelect>
PvFunction pv_rows(int rows) {
  return rows == 4   ? pv_class<kElement, 4, kMode, kSelect>
         : rows == 2 ? pv_class<kElement, 2, kMode, kSelect>
                     : pv_class<kElement, 1, kMode, kSelect>;
}

template <Element kElement>
PvFunction pv_of(int rows, bool has_min, bool select) {
  if constexpr (kElement == Element::kU8 || kElement == Element::kI4) {
    if (has_min) {
      return select ? pv_rows<kElement, PvMode::kAffine, true>(rows)
                    : pv_rows<kElement, PvMode::kAffine, false>(rows);
    }
  }
  if constexpr (kElement == Element::kU8) {
    return nullptr;  // unsigned bytes always have a min
  } else if constexpr (kElement == Element::kI8 || kElement == Element::kI4) {
    return pv_rows<kElement, PvMode::kCodes, false>(rows);  // codes are finite, scales are in p
  } else {
    return select ? pv_rows<kElement, PvMode::kCodes, true>(rows)
                  : pv_rows<kElement, PvMode::kCodes, false>(rows);
  }
}

/// Puts what belongs to the 16 tokens of a tile into the lanes of each step, at out[step * distance]. `a` and
/// `b` hold the 16 values of the class's two groups.
HWY_INLINE void spread(const VClass& cls, const float* a, const float* b, std::ptrdiff_t distance,
                       float* out) {
  const F d;
  for (const VStep& step : cls.steps) {
    const auto pick = hn::SetTableIndices(d, step.pick.data());
    VF lanes = hn::TableLookupLanes(hn::LoadU(d, a + step.token_a), pick);
    if (a != b || step.token_a != step.token_b) {
      const auto use_b = hn::RebindMask(d, hn::Lt(hn::LoadU(I(), step.use_b.data()), hn::Zero(I())));
      lanes = hn::IfThenElse(use_b, hn::TableLookupLanes(hn::LoadU(d, b + step.token_b), pick), lanes);
    }
    hn::StoreU(lanes, d, out);
    out += distance;
  }
}

/// The same for scales or mins of a tile, [groups][16].
HWY_INLINE void spread_params(const VClass& cls, const float* planes, float* out) {
  spread(cls, planes + cls.group_a * kTileTokens, planes + cls.group_b * kTileTokens, kLanes, out);
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_PV_INL_H
