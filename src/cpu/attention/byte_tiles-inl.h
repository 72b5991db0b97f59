// Products of bytes by tiles (AMX), for many rows: the same exact sums as add_byte_products(), 16 x 16 of
// them over 64 bytes by one instruction. Four bytes of each of 16 rows, as that one has them, are a row of a
// right operand; a left one has 64 adjacent bytes of a token, or dim.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/byte_products-inl.h"
#include "cpu/attention/byte_tiles.h"

#if defined(HALFTONE_CPU_BYTE_TILES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_BYTE_TILES_INL_H
#undef HALFTONE_CPU_BYTE_TILES_INL_H
#else
#define HALFTONE_CPU_BYTE_TILES_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3_DL

inline constexpr int kTileRows = 16, kTileBytes = 64;  // of a row

/// Of both operands: which are signed.
enum class TileSigns { kRight, kLeft };

// In assembly, since the attributes of Highway's target leave AMX out.
template <int kTile>
HWY_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
HWY_INLINE void load_tile(const void* at, std::ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
HWY_INLINE void store_tile(void* at, std::ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(stride), "i"(kTile) : "memory");
}
template <int kSum, int kLeft, int kRight, TileSigns kSigns>
HWY_INLINE void multiply_tiles() {
  if constexpr (kSigns == TileSigns::kRight) {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  } else {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
}

/// Rows of an item from which on tiles multiply them: V is turned for all, however few.
inline constexpr int kLeastTiledRows = 32;

/// While it lives the thread's eight tiles have 16 rows of 64 bytes each, if they are wanted and there are
/// any.
class TileScope {
 public:
  explicit TileScope(bool wanted) : has_(wanted && has_byte_tiles()) {
    if (!has_) return;
    struct {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {};
      std::uint8_t rows[16] = {};
    } shapes;
    static_assert(sizeof shapes == 64);
    for (int i = 0; i < 8; ++i) shapes.bytes[i] = kTileBytes, shapes.rows[i] = kTileRows;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TileScope() {
    if (has_) asm volatile("tilerelease");
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

  bool has() const { return has_; }

 private:
  const bool has_;
};

/// What tiles multiply: rows of bytes with those of dwords.
struct TileOperands {
  const void* left;
  std::ptrdiff_t left_stride;  // bytes from row to row
  const std::int32_t* right;
  std::ptrdiff_t right_stride;  // dwords
  int steps;                    // of 64 bytes
};

/// Sums of L x R tiles, [left][right][16][16].
template <int L, int R>
struct TileSums {
  alignas(64) std::int32_t of[L][R][kTileRows * kLanes];
};

template <int L, int R, TileSigns kSigns>
HWY_INLINE void multiply(const TileOperands& a, TileSums<L, R>& sums) {
  static_assert(kLanes == kTileRows && L <= 2 && R <= 2);
  constexpr int kLeft = 4, kRight = 6;  // tiles of the operands; 2 l + r have sums
  const auto* left = static_cast<const std::uint8_t*>(a.left);
  const std::int32_t* right = a.right;
  const std::ptrdiff_t right_bytes = a.right_stride * 4;
  zero_tile<0>();
  if constexpr (R == 2) zero_tile<1>();
  if constexpr (L == 2) zero_tile<2>();
  if constexpr (L == 2 && R == 2) zero_tile<3>();
  for (int step = 0; step < a.steps; ++step) {
    load_tile<kLeft>(left, a.left_stride);
    load_tile<kRight>(right, right_bytes);
    multiply_tiles<0, kLeft, kRight, kSigns>();
    if constexpr (R == 2) {
      load_tile<kRight + 1>(right + kLanes, right_bytes);
      multiply_tiles<1, kLeft, kRight + 1, kSigns>();
    }
    if constexpr (L == 2) {
      load_tile<kLeft + 1>(left + kTileRows * a.left_stride, a.left_stride);
      multiply_tiles<2, kLeft + 1, kRight, kSigns>();
    }
    if constexpr (L == 2 && R == 2) multiply_tiles<3, kLeft + 1, kRight + 1, kSigns>();
    left += kTileBytes;
    right += kTileBytes / 4 * a.right_stride;
  }
  store_tile<0>(sums.of[0][0], kTileBytes);
  if constexpr (R == 2) store_tile<1>(sums.of[0][1], kTileBytes);
  if constexpr (L == 2) store_tile<2>(sums.of[1][0], kTileBytes);
  if constexpr (L == 2 && R == 2) store_tile<3>(sums.of[1][1], kTileBytes);
}

/// `use(L, R, left, right)`, as constants, of all of `lefts` x `rights` rows, 32 x 32 at a time where there
/// are as many left; both are multiples of 16.
template <class Use>
HWY_INLINE void for_tiles(int lefts, int rights, const Use& use) {
  const auto one = std::integral_constant<int, 1>();
  const auto two = std::integral_constant<int, 2>();
  for (int left = 0; left < lefts; left += 2 * kTileRows) {
    const bool pair = left + kTileRows < lefts;
    for (int right = 0; right < rights; right += 2 * kTileRows) {
      const bool wide = right + kTileRows < rights;
      if (pair && wide) {
        use(two, two, left, right);
      } else if (pair) {
        use(two, one, left, right);
      } else if (wide) {
        use(one, two, left, right);
      } else {
        use(one, one, left, right);
      }
    }
  }
}

/// score_bytes() of all rows and `tokens`; `stride`: a multiple of 64.
inline void score_byte_tiles(const std::uint8_t* k, int stride, const std::int32_t* q,
                             const std::int32_t* start, int rows, int tokens, float* scores) {
  for_tiles(tokens, rows, [&](auto l, auto r, int token, int row) HWY_ATTR {
    constexpr int L = decltype(l)::value, R = decltype(r)::value;
    TileSums<L, R> sums;
    multiply<L, R, TileSigns::kRight>({k + token * stride, stride, q + row, rows, stride / kTileBytes}, sums);
    for (int i = 0; i < L; ++i) {
      for (int t = 0; t < kTileRows; ++t) {
        float* const to = scores + (token + i * kTileRows + t) * rows + row;
        for (int j = 0; j < R; ++j) {
          const VI sum =
              hn::Add(hn::Load(I(), sums.of[i][j] + t * kLanes), hn::Load(I(), start + row + j * kLanes));
          hn::Store(hn::ConvertTo(F(), sum), F(), to + j * kLanes);
        }
      }
    }
  });
}

/// Dwords of V, [words][dim], as left operands: [dim][16 words], zeros behind the last.
inline void turn_words(const std::int32_t* words, int count, int dims, std::int32_t* out) {
  for (int d = 0; d < dims; ++d, out += kTileRows) {
    for (int word = 0; word < count; ++word) out[word] = words[word * dims + d];
    for (int word = count; word < kTileRows; ++word) out[word] = 0;
  }
}

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_BYTE_TILES_INL_H
