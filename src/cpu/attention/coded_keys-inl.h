// Blocked path, 16 bits: K as codes. A symmetric scale per token multiplies a logit instead of every element,
// scales of groups the sums over their dims. Codes are exact in bf16, values are not (key_pairs-inl.h).

#include <algorithm>
#include <bit>

#include "cpu/attention/int8_rows-inl.h"
#include "cpu/attention/key_products-inl.h"
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
/// kMaxDim codes of up to 255 stays finite, so that a small scale still makes a logit of it.
inline constexpr float kLargeQuery = 0x1p110f;
inline constexpr float kLargeQueryUnit = 0x1p18f;
static_assert(0x1p128 / kLargeQueryUnit <= kLargeQuery && double{kLargeQuery} * 255 * kMaxDim < 0x1p127);

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

  float key_scale(int token) const { return s_.k_scale[token]; }
  bool scales_queries() const { return large_; }

  HWY_INLINE VF scaled(VF dot, VF q_scale, int token) const {
    dot = hn::Mul(dot, hn::Set(F(), s_.k_scale[token]));
    return large_ ? hn::Mul(dot, q_scale) : dot;
  }

 protected:
  bool large_ = false;  ///< some q_scale is not 1
};

/// Layer::grouped_k.
class GroupedKeys : public CodedKeys {
 public:
  static constexpr bool kGroups = true;

  using CodedKeys::CodedKeys;

  void begin_queries(int rows) const {
    CodedKeys::begin_queries(rows);
    std::fill_n(s_.codes.q_sums, rows * layer_.k.groups, 0.0f);
  }

  void take_query(const Strip& strip, int r) {
    CodedKeys::take_query(strip, r);
    if (!layer_.k.has_min) return;
    const int groups = layer_.k.groups, size = layer_.head_dim / groups;
    float* const sums = s_.codes.q_sums + strip.first * groups + (r - strip.first);
    for (int g = 0; g < groups; ++g) {
      float sum = 0;
      for (int i = 0; i < size; ++i) sum += s_.row[g * size + i];
      sums[g * strip.rows] = sum;
    }
  }

  HWY_INLINE VF scaled(VF dot, VF q_scale, int /*token*/) const {
    return large_ ? hn::Mul(dot, q_scale) : dot;
  }

  /// Of tokens whose codes have `width` Products.
  template <int C, class Products>
  HWY_INLINE void score_groups_of(const Strip& strip, int token, int width, int column, float* scores) const {
    const int groups = layer_.k.groups;
    const KeyGroups params{&layer_.maps->k, s_.k_scale + token * groups, s_.k_min + token * groups,
                           s_.codes.q_sums + strip.first * groups + column};
    const float* const k = s_.decoded + token * width;
    const float* const q = s_.q + strip.first * width + column;
    const auto score = layer_.k.has_min ? score_groups<C, Products, true> : score_groups<C, Products, false>;
    score(params, k, width, q, strip.rows, scores);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_CODED_KEYS_INL_H
