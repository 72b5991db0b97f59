// Blocked path, 16 bits: K as the codes of a format with one symmetric scale per token, which multiplies a
// logit instead of every element. Codes are exact in bf16, values are not (key_pairs-inl.h).

#include <algorithm>
#include <bit>

#include "cpu/attention/int8_rows-inl.h"
#include "cpu/attention/tile_source-inl.h"

#if defined(HALFTONE_CPU_CODED_KEYS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_CODED_KEYS_INL_H
#undef HALFTONE_CPU_CODED_KEYS_INL_H
#else
#define HALFTONE_CPU_CODED_KEYS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// Rows of Q that reach kLargeQuery are divided by kLargeQueryUnit, which multiplies their logits: a sum over
/// kMaxDim codes of up to 127 stays finite, so that a small scale still makes a logit of it.
inline constexpr float kLargeQuery = 0x1p111f;
inline constexpr float kLargeQueryUnit = 0x1p17f;
static_assert(0x1p128 / kLargeQueryUnit <= kLargeQuery && double{kLargeQuery} * 127 * kMaxDim < 0x1p127);

/// Layer::stored_k.
class CodedKeys : public TileSource {
 public:
  static constexpr bool kCodes = true;

  using TileSource::TileSource;

  void begin_queries(int rows) const { std::fill_n(s_.codes.q_scale, rows, 1.0f); }

  void take_query(const Strip& /*strip*/, int r) {
    // Infinities and NaNs are large, too.
    if (largest_bits(s_.row, layer_.head_dim) < std::bit_cast<std::uint32_t>(kLargeQuery)) return;
    large_ = true;
    s_.codes.q_scale[r] = kLargeQueryUnit;
    for (int i = 0; i < layer_.head_dim; ++i) s_.row[i] *= 1 / kLargeQueryUnit;
  }

  void decode_k(float* out) const { decode_codes(out); }

  HWY_INLINE VF scaled(VF dot, VF q_scale, int token) const {
    dot = hn::Mul(dot, hn::Set(F(), s_.k_scale[token]));
    return large_ ? hn::Mul(dot, q_scale) : dot;
  }

 private:
  bool large_ = false;  ///< some q_scale is not 1
};

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_CODED_KEYS_INL_H
