// Tiles (AMX): a thread's eight of 16 rows of 64 bytes, and sums of their products.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cpu/attention/matrix_tiles.h"
#include "cpu/attention/vec-inl.h"

#if defined(HALFTONE_CPU_MATRIX_TILES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_MATRIX_TILES_INL_H
#undef HALFTONE_CPU_MATRIX_TILES_INL_H
#else
#define HALFTONE_CPU_MATRIX_TILES_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

inline constexpr int kTileRows = 16, kTileBytes = 64;  // of a row

#if HWY_TARGET == HWY_AVX3_DL

static_assert(kLanes == kTileRows);

/// What an instruction multiplies: of each dword of a left and a right operand four bytes, or two bf16.
enum class TileProducts {
  kSignedRight,  ///< bytes, unsigned in the left operand
  kSignedLeft,   ///< bytes, unsigned in the right operand
  kPairs,        ///< bf16; sums in fp32, of the first ones and of the second ones apart, which then meet
};

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
template <int kSum, int kLeft, int kRight, TileProducts kProducts>
HWY_INLINE void multiply_tiles() {
  if constexpr (kProducts == TileProducts::kSignedRight) {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  } else if constexpr (kProducts == TileProducts::kSignedLeft) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  } else {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
  }
}

/// While it lives the thread's tiles are whole ones, if they are wanted.
class TileScope {
 public:
  explicit TileScope(bool wanted) : has_(wanted) {
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

/// A side of what tiles multiply; distances are bytes. Of the left one a row has 64 adjacent bytes of 16
/// tokens or dims, of the right one a dword of each of 16 rows of Q or P.
struct TileOperand {
  const void* at;
  std::ptrdiff_t stride;  // from row to row
  std::ptrdiff_t step;    // to the next 64 bytes, or 16 dwords, of all rows
  std::ptrdiff_t next;    // to the next 16 tokens, dims or rows
};

/// Adds the products of L x R tiles to tiles 0 to 3: 2 l + r.
template <int L, int R, TileProducts kProducts>
HWY_INLINE void add_products(const TileOperand& a, const TileOperand& b, int steps) {
  static_assert(L <= 2 && R <= 2);
  constexpr int kLeft = 4, kRight = 6;
  const auto* left = static_cast<const std::uint8_t*>(a.at);
  const auto* right = static_cast<const std::uint8_t*>(b.at);
  for (int step = 0; step < steps; ++step, left += a.step, right += b.step) {
    load_tile<kLeft>(left, a.stride);
    load_tile<kRight>(right, b.stride);
    multiply_tiles<0, kLeft, kRight, kProducts>();
    if constexpr (R == 2) {
      load_tile<kRight + 1>(right + b.next, b.stride);
      multiply_tiles<1, kLeft, kRight + 1, kProducts>();
    }
    if constexpr (L == 2) {
      load_tile<kLeft + 1>(left + a.next, a.stride);
      multiply_tiles<2, kLeft + 1, kRight, kProducts>();
    }
    if constexpr (L == 2 && R == 2) multiply_tiles<3, kLeft + 1, kRight + 1, kProducts>();
  }
}

template <int L, int R>
HWY_INLINE void zero_tile_sums() {
  zero_tile<0>();
  if constexpr (R == 2) zero_tile<1>();
  if constexpr (L == 2) zero_tile<2>();
  if constexpr (L == 2 && R == 2) zero_tile<3>();
}

/// Where L x R tiles of sums are, the rows of each adjacent: `left` and `right` bytes to the next ones.
struct TileSums {
  void* at;
  std::ptrdiff_t left;
  std::ptrdiff_t right;

  template <int L, int R>
  HWY_INLINE void load() const {
    const auto* from = static_cast<const std::uint8_t*>(at);
    load_tile<0>(from, kTileBytes);
    if constexpr (R == 2) load_tile<1>(from + right, kTileBytes);
    if constexpr (L == 2) load_tile<2>(from + left, kTileBytes);
    if constexpr (L == 2 && R == 2) load_tile<3>(from + left + right, kTileBytes);
  }
  template <int L, int R>
  HWY_INLINE void store() const {
    auto* to = static_cast<std::uint8_t*>(at);
    store_tile<0>(to, kTileBytes);
    if constexpr (R == 2) store_tile<1>(to + right, kTileBytes);
    if constexpr (L == 2) store_tile<2>(to + left, kTileBytes);
    if constexpr (L == 2 && R == 2) store_tile<3>(to + left + right, kTileBytes);
  }
};

/// Rows of dwords become columns.
HWY_INLINE void transpose_dwords(__m512i (&x)[16]) {
  __m512i y[16];
  HALFTONE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  HALFTONE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // Block b of x[4 i + j] has column 4 b + j of rows 4 i to 4 i + 3.
  HALFTONE_UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
    const __m512i high = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
    const __m512i low2 = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    const __m512i high2 = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    y[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    y[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
    y[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
  HALFTONE_UNROLL
  for (int i = 0; i < 16; ++i) x[i] = y[i];
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

#else

/// There are no tiles.
class TileScope {
 public:
  explicit TileScope(bool /*wanted*/) {}
  static constexpr bool has() { return false; }
};

#endif  // HWY_TARGET == HWY_AVX3_DL

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_MATRIX_TILES_INL_H
