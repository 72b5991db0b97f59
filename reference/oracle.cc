#include "reference/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "reference/row_block.h"

namespace halftone::reference {
namespace {

template <class Real, class In>
void attention(const OracleParams& p, const In* q, const In* k, const In* v, Real* out, Real* lse,
               Real* unsure) {
  const std::int64_t rows = p.q_len * (p.q_heads / p.kv_heads);
  const std::int64_t blocks = (rows + loops::kRowBlock - 1) / loops::kRowBlock;
  const std::int64_t tasks = blocks * p.kv_heads;
#pragma omp parallel if (rows * p.kv_heads * p.kv_len > 4096)
  {
    loops::RowBlock<Real> block(p);
#pragma omp for schedule(dynamic)
    for (std::int64_t task = 0; task < tasks; ++task) {
      const std::int64_t first = task % blocks * loops::kRowBlock;
      block.compute(static_cast<int>(task / blocks), first,
                    std::min<std::int64_t>(loops::kRowBlock, rows - first), q, k, v, out, lse, unsure);
    }
  }
}

/// Each query attends to rows of its own, as a request whose only tokens they are.
template <class Real, class In>
void listed_attention(const OracleParams& p, const In* q, const In* k, const In* v, Real* out, Real* lse,
                      Real* unsure) {
  const auto rows_of = [](const std::vector<std::int64_t>& list, const In* from, std::int64_t width) {
    std::vector<In> rows;
    for (const std::int64_t key : list) rows.insert(rows.end(), from + key * width, from + (key + 1) * width);
    return rows;
  };
  for (std::int64_t i = 0; i < p.q_len; ++i) {
    const std::vector<std::int64_t>& list = p.lists[static_cast<std::size_t>(i)];
    const std::vector<In> keys = rows_of(list, k, std::int64_t{p.kv_heads} * p.head_dim);
    const std::vector<In> values = rows_of(list, v, std::int64_t{p.kv_heads} * p.v_dim());
    OracleParams one = p;
    one.q_len = 1;
    one.kv_len = static_cast<std::int64_t>(list.size());
    one.causal = false;
    one.window_left = one.window_right = -1;
    attention(one, q + i * p.q_heads * p.head_dim, keys.data(), values.data(),
              out + i * p.q_heads * p.v_dim(), lse + i * p.q_heads, unsure + i * p.q_heads);
  }
}

template <class Real, class In>
void attention(const OracleParams& p, const In* q, const In* k, const In* v, std::vector<Real>& out,
               std::vector<Real>& lse, std::vector<Real>& unsure) {
  out.assign(static_cast<std::size_t>(p.q_len * p.q_heads * p.v_dim()), Real{0});
  lse.assign(static_cast<std::size_t>(p.q_len * p.q_heads), Real{0});
  unsure = lse;
  if (p.lists.empty()) return attention(p, q, k, v, out.data(), lse.data(), unsure.data());
  listed_attention(p, q, k, v, out.data(), lse.data(), unsure.data());
}

/// Largest |a - truth| over a row; infinite where exactly one of the two is NaN or they differ in an
/// infinity.
double row_error(const double* truth, const float* a, int dim) {
  double worst = 0;
  for (int d = 0; d < dim; ++d) {
    const double x = a[d];
    if (std::isnan(truth[d]) && std::isnan(x)) continue;
    if (x == truth[d]) continue;
    const double e = std::abs(x - truth[d]);
    if (std::isnan(e)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, e);
  }
  return worst;
}

double row_magnitude(const double* truth, int dim) {
  double a = 0;
  for (int d = 0; d < dim; ++d) a = std::isfinite(truth[d]) ? std::max(a, std::abs(truth[d])) : a;
  return a;
}

}  // namespace

VisibleKeys visible_keys(const OracleParams& p, std::int64_t i) {
  const std::int64_t position = i + p.kv_len - p.q_len;
  std::int64_t begin = 0;
  std::int64_t end = p.kv_len;
  if (p.causal) end = std::min(end, position + 1);
  if (p.window_left >= 0) begin = std::max(begin, position - p.window_left);
  if (p.window_right >= 0) end = std::min(end, position + p.window_right + 1);
  return end > begin ? VisibleKeys{begin, end} : VisibleKeys{0, 0};
}

OracleResult attention_oracle(const OracleParams& params, const float* q, const float* k, const float* v) {
  OracleResult result;
  attention(params, q, k, v, result.out, result.lse, result.unsure);
  return result;
}

OracleResult attention_oracle(const OracleParams& params, const double* q, const double* k, const double* v) {
  OracleResult result;
  attention(params, q, k, v, result.out, result.lse, result.unsure);
  return result;
}

PlainResult attention_plain_fp32(const OracleParams& params, const float* q, const float* k, const float* v,
                                 DType out_dtype) {
  PlainResult result;
  std::vector<float> unsure;
  attention(params, q, k, v, result.out, result.lse, unsure);
  for (float& x : result.out) x = round_to(out_dtype, x);
  return result;
}

double rounding_step(DType dtype, double a) {
  switch (dtype) {
    case DType::kFloat16:
      return std::max(std::ldexp(a, -11), std::ldexp(1.0, -25));
    case DType::kBFloat16:
      return std::max(std::ldexp(a, -8), std::ldexp(1.0, -134));
    default:
      return std::max(std::ldexp(a, -24), std::ldexp(1.0, -150));
  }
}

Verdict judge_output(std::int64_t rows, int dim, const double* truth, const float* plain, const float* actual,
                     DType dtype, double slack, std::span<const double> row_slack) {
  Verdict verdict;
  const auto slack_of = [&](std::int64_t r) {
    return row_slack.empty() ? 0 : row_slack[static_cast<std::size_t>(r)];
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    const double a = row_magnitude(truth + r * dim, dim);
    const double e = row_error(truth + r * dim, plain + r * dim, dim);
    if (a > 0 && std::isfinite(e)) {
      verdict.plain_error = std::max(verdict.plain_error, std::max(0.0, e - slack_of(r)) / a);
    }
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const double a = row_magnitude(truth + r * dim, dim);
    const double e = row_error(truth + r * dim, actual + r * dim, dim);
    // An output dtype that overflows does so for the yardstick as well.
    if (std::isinf(e) && std::isinf(row_error(truth + r * dim, plain + r * dim, dim)) &&
        std::equal(plain + r * dim, plain + (r + 1) * dim, actual + r * dim)) {
      continue;
    }
    if (a > 0) verdict.error = std::max(verdict.error, e / a);
    const double limit =
        a > 0 ? 2 * verdict.plain_error * a + rounding_step(dtype, a) + slack + slack_of(r) : 0;
    if (e > limit && verdict.ok) {
      verdict.ok = false;
      verdict.row = r;
      std::ostringstream text;
      text << "row " << r << ": error " << e << ", limit " << limit << ", largest value " << a
           << ", relative error of plain fp32 " << verdict.plain_error;
      verdict.sentence = text.str();
    }
  }
  return verdict;
}

Verdict judge_lse(std::int64_t rows, const double* truth, const float* plain, const float* actual,
                  double slack) {
  Verdict verdict;
  for (std::int64_t r = 0; r < rows; ++r) {
    const double e = row_error(truth + r, plain + r, 1);
    if (std::isfinite(e)) verdict.plain_error = std::max(verdict.plain_error, e);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const double e = row_error(truth + r, actual + r, 1);
    const double magnitude = std::isfinite(truth[r]) ? std::max(1.0, std::abs(truth[r])) : 0.0;
    const double limit = 2 * verdict.plain_error + magnitude * (std::ldexp(1.0, -24) + slack);
    verdict.error = std::max(verdict.error, e);
    if (e > limit && verdict.ok) {
      verdict.ok = false;
      verdict.row = r;
      std::ostringstream text;
      text << "LSE of row " << r << " is " << actual[r] << ", must be " << truth[r] << " within " << limit;
      verdict.sentence = text.str();
    }
  }
  return verdict;
}

}  // namespace halftone::reference
