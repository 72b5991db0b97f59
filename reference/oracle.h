// Attention in double precision, straight from its definition: the judge of every backend. It knows types.h
// and nothing else of the library.
//
// Tolerance rule. `attention_oracle` on the dequantised cache (code * scale + min, rounded to fp32) is the
// truth; `attention_plain_fp32` is the same computation in plain fp32 (two passes, sums in index order),
// rounded once to the output dtype. For a row r (one query and one head) let a_r be the largest |truth| of
// the row, and
//     P = max over rows of (max over dims |plain - truth|) / a_r.
// Then |actual - truth| <= 2 P a_r + step(a_r) for every element, where step(a) is one rounding of the output
// dtype: u a with u = 2^-24 (f32), 2^-11 (f16), 2^-8 (bf16), and never less than half of the smallest
// subnormal. A row that sees no key has a_r = 0 and must be exactly zero. P is taken over all rows of a call:
// a single row's plain error may be zero by luck. LSE: |actual - truth| <= 2 max|plain - truth| + 2^-24
// max(1, |truth|), and -inf exactly where the truth is -inf.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "halftone/types.h"

namespace halftone::reference {

/// One request with every option, as defined in halftone/attention.h. Arrays are contiguous: q [q_len,
/// q_heads, head_dim], k [kv_len, kv_heads, head_dim], v [kv_len, kv_heads, v_dim].
struct OracleParams {
  std::int64_t q_len = 0;
  std::int64_t kv_len = 0;
  int q_heads = 1;
  int kv_heads = 1;
  int head_dim = 0;
  int v_head_dim = 0;  ///< 0 means head_dim
  bool causal = false;
  int window_left = -1;                 ///< -1: unlimited
  int window_right = -1;                ///< -1: unlimited
  double scale = 0;                     ///< 0 means 1/sqrt(head_dim)
  double softcap = 0;                   ///< 0: none
  std::span<const float> alibi_slopes;  ///< [q_heads] or empty
  std::span<const float> sinks;         ///< [q_heads] or empty
  /// [q_len]: the keys of each query, in the order and as often as listed, in place of kv_len and the mask.
  /// Empty: all keys.
  std::span<const std::vector<std::int64_t>> lists;
  /// Not 0: weights become codes rint(255 * exp(x - m)), m the largest logit that the row sees among the
  /// request's tokens [i * weight_tokens, (i + 1) * weight_tokens), times exp(m - max) / 255; their sum and
  /// the LSE are those of exact weights.
  int weight_tokens = 0;

  int v_dim() const { return v_head_dim == 0 ? head_dim : v_head_dim; }
};

/// out [q_len, q_heads, v_dim] and lse [q_len, q_heads] (natural log, sink included). A row that sees no key
/// has zeros and -inf. Keys outside a row's mask are never read for that row.
struct OracleResult {
  std::vector<double> out;
  std::vector<double> lse;
  /// [q_len, q_heads], relative to the sum of the weights: how independent errors of the weights add up, the
  /// root of the sum of their squares; with weight_tokens the weight that a row's codes may be off by, one
  /// step for each that lies as near a half as fp32 may be off.
  std::vector<double> unsure;
};
OracleResult attention_oracle(const OracleParams& params, const float* q, const float* k, const float* v);
OracleResult attention_oracle(const OracleParams& params, const double* q, const double* k, const double* v);

/// The yardstick: fp32 throughout; `out` rounded to `out_dtype` (kFloat32, kFloat16 or kBFloat16) and widened
/// again.
struct PlainResult {
  std::vector<float> out;
  std::vector<float> lse;
};
PlainResult attention_plain_fp32(const OracleParams& params, const float* q, const float* k, const float* v,
                                 DType out_dtype);

/// Keys [begin, end) that query `i` of a request sees; empty is begin == end.
struct VisibleKeys {
  std::int64_t begin;
  std::int64_t end;
};
VisibleKeys visible_keys(const OracleParams& params, std::int64_t i);

/// Rounds to the nearest value of `dtype` (kFloat32, kFloat16 or kBFloat16), ties to even, and widens again.
float round_to(DType dtype, float x);

/// What Arithmetic::kHalfInt8 makes of rows of `dim` values (halftone/attention.h, docs/arithmetic.md), as
/// code times scale, without a rounding of the product: codes rint(x * (127 / absmax)), scale absmax / 127,
/// both quotients in fp32. A row of zeros, or of values so small that 127 / absmax is infinite, becomes
/// zeros; one that holds an infinity or a NaN becomes NaNs.
std::vector<double> int8_rows(std::span<const float> x, int dim);

/// The same with codes of E4M3, as Arithmetic::kFp8 has them: the scale is the smallest power of two from
/// 2^-126 on that leaves magnitudes of at most 448, and codes are the nearest to x / scale, ties to even.
std::vector<double> e4m3_rows(std::span<const float> x, int dim);

/// What Arithmetic::kFullInt8 and kFp8 make of V, one request's [tokens, channels]: each channel of a block
/// of 128 tokens is a row of the rules above. Tokens before `first` do not count: they become zeros.
std::vector<double> int8_blocks(std::span<const float> v, std::int64_t channels, std::int64_t first);
std::vector<double> e4m3_blocks(std::span<const float> v, std::int64_t channels, std::int64_t first);

/// One rounding step of `dtype` for a value of magnitude `a`, as in the rule above.
double rounding_step(DType dtype, double a);

/// What the tolerance rule says about one call.
struct Verdict {
  bool ok = true;
  double error = 0;        ///< largest (element error) / a_r
  double plain_error = 0;  ///< P
  std::int64_t row = -1;   ///< the first row that breaks the rule
  std::string sentence;    ///< why, empty when ok
};

/// truth, plain and actual: [rows, dim]; `actual` widened from `dtype`. `slack` is added to the limit, and
/// `row_slack` [rows], or none, to that of its row: P leaves it out.
Verdict judge_output(std::int64_t rows, int dim, const double* truth, const float* plain, const float* actual,
                     DType dtype, double slack = 0, std::span<const double> row_slack = {});

/// truth, plain and actual: [rows]. `slack` widens the limit, relative to max(1, |LSE|).
Verdict judge_lse(std::int64_t rows, const double* truth, const float* plain, const float* actual,
                  double slack = 0);

}  // namespace halftone::reference
