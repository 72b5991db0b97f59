// Direct path: sums of p * v over the tiles of a chunk, on the codes of V as they lie.
//
// Lanes of an accumulator hold partial sums over some of the tokens; they are added up once per item. Every
// product needs p (with the token's scale, if V is symmetric) in the lane of its token: the patterns.

#include "cpu/attention/tiles.h"
#include "cpu/attention/vec-inl.h"

#if defined(HALFTONE_CPU_PV_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_PV_INL_H
#undef HALFTONE_CPU_PV_INL_H
#else
#define HALFTONE_CPU_PV_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// Codes of an asymmetric V become values first, code * scale + min: a min that enters through sum(p) * min
/// would cancel against sum(p * code * scale). Those of a symmetric V stay bare; scales are in p, and
/// plane_unit() is left to the end.
struct PvArgs {
  const VMap* map;
  const VClass* cls;
  const Chunk* chunk;
  const float* p;      // packed: [step][tile][R][N]; row order: [R][kChunkTokens]
  const float* scale;  // asymmetric: [step][tile][plane][N], the second plane times plane_unit()
  const float* min;    // asymmetric: [step][tile][N]
  const float* alpha;  // [R], or null if all are 1
  float* acc;          // [accumulator][plane][R][N]
  Prefetcher* prefetcher;
};

/// kSelect: where p is 0 the value does not count, whatever it is (a NaN in a slot that the row must not
/// see).
template <Element kElement, int R, bool kSelect, int A>
HWY_INLINE void pv_block(const PvArgs& a, int first) {
  constexpr int P = planes_of(kElement);
  const F d;
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
  const int tiles = a.chunk->tiles;
  const int steps = row_order(kElement) ? kTileTokens : static_cast<int>(a.cls->steps.size());
  for (int tile = 0; tile < tiles; ++tile) {
    const std::uint8_t* data = a.chunk->tile[tile].v;
    a.prefetcher->advance();
    for (int step = 0; step < steps; ++step) {
      const int pattern = step * tiles + tile;
      VF p[R];
      if constexpr (row_order(kElement)) {
        HALFTONE_UNROLL
        for (int r = 0; r < R; ++r) p[r] = hn::Set(d, a.p[r * kChunkTokens + tile * kTileTokens + step]);
      } else {
        HALFTONE_UNROLL
        for (int r = 0; r < R; ++r) p[r] = hn::LoadU(d, a.p + (pattern * R + r) * kLanes);
      }
      const std::uint8_t* at =
          data + (row_order(kElement) ? step * a.chunk->tile[tile].v_stride : a.cls->steps[step].offset);
      HALFTONE_UNROLL
      for (int i = 0; i < A; ++i) {
        VF value[P];
        Decoder<kElement>::load(at + base[i], value);
        HALFTONE_UNROLL
        for (int plane = 0; plane < P; ++plane) {
          if constexpr (asymmetric(kElement)) {
            value[plane] = hn::MulAdd(value[plane], hn::LoadU(d, a.scale + (pattern * P + plane) * kLanes),
                                      hn::LoadU(d, a.min + pattern * kLanes));
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

/// Accumulators of one pv_block.
constexpr int block_accumulators(int rows, int planes) {
  const int wish = kAccumulators / (rows * planes);
  return wish < 1 ? 1 : wish > 8 ? 8 : wish;
}

/// At least this many pv_blocks go over every tile.
inline int pv_blocks(const VMap& map, int rows) {
  return map.accumulators() / block_accumulators(rows, map.planes);
}

template <Element kElement, int R, bool kSelect>
HWY_NOINLINE void pv_class(const PvArgs& a) {
  constexpr int A = block_accumulators(R, planes_of(kElement));
  const int end = a.cls->first + a.cls->count;
  int first = a.cls->first;
  for (; first + A <= end; first += A) pv_block<kElement, R, kSelect, A>(a, first);
  if constexpr (A > 1) {
    for (; first < end; ++first) pv_block<kElement, R, kSelect, 1>(a, first);
  }
}

using PvFunction = void (*)(const PvArgs&);

template <Element kElement, bool kSelect>
PvFunction pv_rows(int rows) {
  return rows == 4   ? pv_class<kElement, 4, kSelect>
         : rows == 2 ? pv_class<kElement, 2, kSelect>
                     : pv_class<kElement, 1, kSelect>;
}

template <Element kElement>
PvFunction pv_of(int rows, bool select) {
  if constexpr (kElement == Element::kI8 || kElement == Element::kI4) {
    return pv_rows<kElement, false>(rows);  // codes are finite, scales are in p
  } else {
    return select ? pv_rows<kElement, true>(rows) : pv_rows<kElement, false>(rows);
  }
}

/// Puts what belongs to a token into the lanes of one step. `a` and `b` hold 16 values for the class's two
/// groups.
class Spreader {
 public:
  explicit HWY_INLINE Spreader(const VStep& step)
      : token_a_(step.token_a),
        token_b_(step.token_b),
        pick_(hn::SetTableIndices(F(), step.pick.data())),
        use_b_(hn::RebindMask(F(), hn::Lt(hn::LoadU(I(), step.use_b.data()), hn::Zero(I())))) {}

  HWY_INLINE VF operator()(const float* a, const float* b) const {
    const F d;
    const VF first = hn::TableLookupLanes(hn::LoadU(d, a + token_a_), pick_);
    if (a == b && token_a_ == token_b_) return first;
    return hn::IfThenElse(use_b_, hn::TableLookupLanes(hn::LoadU(d, b + token_b_), pick_), first);
  }

 private:
  std::int32_t token_a_;
  std::int32_t token_b_;
  decltype(hn::SetTableIndices(F(), static_cast<const std::int32_t*>(nullptr))) pick_;
  hn::Mask<F> use_b_;
};

/// p * scale of 16 tokens; 0 stays 0, whatever the scale of a token that the row does not see.
HWY_INLINE void scale_weights(const float* p, const float* scale, float* out) {
  const F d;
  for (int t = 0; t < kTileTokens; t += kLanes) {
    const VF x = hn::LoadU(d, p + t);
    const VF y = hn::Mul(x, hn::LoadU(d, scale + t));
    hn::StoreU(hn::IfThenElseZero(hn::Ne(x, hn::Zero(d)), y), d, out + t);
  }
}

/// Adds up the lanes of a block's accumulators: out [rows][dim].
inline void gather_lanes(const Side& side, const VMap& map, int rows, const float* acc, float* out) {
  const int width = map.accumulators() * map.planes;
  std::fill_n(out, rows * side.dim, 0.0f);
  for (int i = 0; i < width * rows; ++i, acc += kLanes) {
    const std::int16_t* dims = map.dims.data() + i / rows * kLanes;
    const float unit = side.has_min ? 1.0f : plane_unit(i / rows % map.planes);
    for (int lane = 0; lane < kLanes; ++lane) out[i % rows * side.dim + dims[lane]] += acc[lane] * unit;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_PV_INL_H
