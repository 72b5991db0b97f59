#include "reference/oracle.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>

namespace halftone::reference {
namespace {

constexpr int kRowBlock = 32;  // rows that share a converted block of keys
constexpr int kKeyBlock = 64;

/// One task: up to kRowBlock rows of one KV head.
template <class Real>
class RowBlock {
 public:
  explicit RowBlock(const OracleParams& p) : p_(p), logits_(static_cast<std::size_t>(kRowBlock * p.kv_len)) {
    keys_.resize(static_cast<std::size_t>(p.head_dim * kKeyBlock));
    queries_.resize(static_cast<std::size_t>(p.head_dim * kRowBlock));
    sums_.resize(static_cast<std::size_t>(p.v_dim() * kRowBlock));
    values_.resize(static_cast<std::size_t>(p.v_dim()));
  }

  template <class In>
  void compute(int kv_head, std::int64_t first_row, std::int64_t rows, const In* q, const In* k, const In* v,
               Real* out, Real* lse, Real* unsure) {
    kv_head_ = kv_head;
    rows_ = static_cast<int>(rows);
    const int group = p_.q_heads / p_.kv_heads;
    begin_ = p_.kv_len;
    end_ = 0;
    for (int r = 0; r < rows_; ++r) {
      Row& row = row_[r];
      row.query = (first_row + r) / group;
      row.head = kv_head * group + static_cast<int>((first_row + r) % group);
      const VisibleKeys keys = visible_keys(p_, row.query);
      row.begin = keys.begin;
      row.end = keys.end;
      if (row.begin < row.end) {
        begin_ = std::min(begin_, row.begin);
        end_ = std::max(end_, row.end);
      }
      const In* source = q + (row.query * p_.q_heads + row.head) * p_.head_dim;
      for (int d = 0; d < p_.head_dim; ++d) queries_[r * p_.head_dim + d] = static_cast<Real>(source[d]);
    }
    scores(k);
    softmax(lse, unsure);
    weighted_sum(v, out);
  }

 private:
  struct Row {
    std::int64_t query, begin, end;
    int head;
    Real inverse_sum;
  };

  /// logits_[r][j] = q_r . k_j over the union of the rows' ranges, the sum over dims in index order.
  template <class In>
  void scores(const In* k) {
    for (std::int64_t j0 = begin_; j0 < end_; j0 += kKeyBlock) {
      const int n = static_cast<int>(std::min<std::int64_t>(kKeyBlock, end_ - j0));
      for (int j = 0; j < n; ++j) {
        const In* source = k + ((j0 + j) * p_.kv_heads + kv_head_) * p_.head_dim;
        for (int d = 0; d < p_.head_dim; ++d) keys_[d * kKeyBlock + j] = static_cast<Real>(source[d]);
      }
      for (int r = 0; r < rows_; ++r) {
        if (row_[r].end <= j0 || row_[r].begin >= j0 + n) continue;
        Real sum[kKeyBlock] = {};
        const Real* query = &queries_[r * p_.head_dim];
        for (int d = 0; d < p_.head_dim; ++d) {
          const Real* key = &keys_[d * kKeyBlock];
          for (int j = 0; j < kKeyBlock; ++j) sum[j] += query[d] * key[j];
        }
        std::copy_n(sum, n, &logits_[r * p_.kv_len + j0]);
      }
    }
  }

  /// Turns logits into exp(logit - max) and writes the LSE, and what of the weights is unsure.
  void softmax(Real* lse, Real* unsure) {
    const Real scale = p_.scale != 0 ? static_cast<Real>(p_.scale)
                                     : static_cast<Real>(1.0 / std::sqrt(static_cast<double>(p_.head_dim)));
    const Real softcap = static_cast<Real>(p_.softcap);
    for (int r = 0; r < rows_; ++r) {
      Row& row = row_[r];
      Real* logit = &logits_[r * p_.kv_len];
      Real& row_lse = lse[row.query * p_.q_heads + row.head];
      if (row.begin == row.end) {
        row_lse = -std::numeric_limits<Real>::infinity();
        continue;
      }
      const Real slope = p_.alibi_slopes.empty() ? Real{0} : static_cast<Real>(p_.alibi_slopes[row.head]);
      const Real position = static_cast<Real>(row.query + p_.kv_len - p_.q_len);
      const bool sink = !p_.sinks.empty();
      Real top = sink ? static_cast<Real>(p_.sinks[row.head]) : -std::numeric_limits<Real>::infinity();
      for (std::int64_t j = row.begin; j < row.end; ++j) {
        Real x = logit[j] * scale;
        if (softcap > 0) x = softcap * std::tanh(x / softcap);
        if (slope != 0) x -= slope * std::abs(position - static_cast<Real>(j));
        logit[j] = x;
        top = x > top ? x : top;
      }
      Real sum = sink ? std::exp(static_cast<Real>(p_.sinks[row.head]) - top) : Real{0};
      for (std::int64_t j = row.begin; j < row.end; ++j) sum += std::exp(logit[j] - top);
      if (p_.weight_tokens != 0) {
        const Real off = code_weights(row, logit, top, slope);
        unsure[row.query * p_.q_heads + row.head] = off / sum;
      } else {
        Real squares = 0;
        for (std::int64_t j = row.begin; j < row.end; ++j) {
          logit[j] = std::exp(logit[j] - top);
          squares += logit[j] * logit[j];
        }
        unsure[row.query * p_.q_heads + row.head] = std::sqrt(squares) / sum;
      }
      row_lse = top + std::log(sum);
      row.inverse_sum = Real{1} / sum;
    }
  }

  /// Logits become weights with codes of 8 bits. Returns what of their sum hangs on the last bits of fp32: a
  /// logit is a few roundings of its parts, at most 2^-20 of them, off, and so is the largest one beside it.
  Real code_weights(const Row& row, Real* logit, Real top, Real slope) const {
    const Real position = static_cast<Real>(row.query + p_.kv_len - p_.q_len);
    Real unsure = 0;
    for (std::int64_t j = row.begin; j < row.end;) {
      const std::int64_t end = std::min(row.end, (j / p_.weight_tokens + 1) * p_.weight_tokens);
      Real near = -std::numeric_limits<Real>::infinity(), parts = 0;
      for (std::int64_t i = j; i < end; ++i) {
        near = logit[i] > near ? logit[i] : near;
        const Real alibi = slope * std::abs(position - static_cast<Real>(i));
        parts = std::max(parts, std::abs(logit[i]) + 2 * std::abs(alibi));
      }
      const Real unit = std::exp(near - top) / 255, rounding = (1 + 2 * parts) * static_cast<Real>(0x1p-20);
      for (; j < end; ++j) {
        const Real code = 255 * std::exp(logit[j] - near);
        if (std::abs(code - std::floor(code) - Real{0.5}) <= code * rounding) unsure += unit;
        logit[j] = std::nearbyint(code) * unit;
      }
    }
    return unsure;
  }

  template <class In>
  void weighted_sum(const In* v, Real* out) {
    const int dim = p_.v_dim();
    std::fill(sums_.begin(), sums_.end(), Real{0});
    for (std::int64_t j = begin_; j < end_; ++j) {
      const In* source = v + (j * p_.kv_heads + kv_head_) * dim;
      for (int d = 0; d < dim; ++d) values_[d] = static_cast<Real>(source[d]);
      for (int r = 0; r < rows_; ++r) {
        if (j < row_[r].begin || j >= row_[r].end) continue;
        const Real weight = logits_[r * p_.kv_len + j];
        const Real* value = values_.data();
        Real* sum = &sums_[r * dim];
        for (int d = 0; d < dim; ++d) sum[d] += weight * value[d];
      }
    }
    for (int r = 0; r < rows_; ++r) {
      const Row& row = row_[r];
      Real* target = out + (row.query * p_.q_heads + row.head) * dim;
      for (int d = 0; d < dim; ++d) {
        target[d] = row.begin == row.end ? Real{0} : sums_[r * dim + d] * row.inverse_sum;
      }
    }
  }

  const OracleParams& p_;
  int kv_head_ = 0;
  int rows_ = 0;
  std::int64_t begin_ = 0, end_ = 0;
  Row row_[kRowBlock];
  std::vector<Real> logits_;   // [kRowBlock, kv_len]
  std::vector<Real> keys_;     // [head_dim, kKeyBlock]
  std::vector<Real> queries_;  // [kRowBlock, head_dim]
  std::vector<Real> sums_;     // [kRowBlock, v_dim]
  std::vector<Real> values_;   // [v_dim]
};

template <class Real, class In>
void attention(const OracleParams& p, const In* q, const In* k, const In* v, Real* out, Real* lse,
               Real* unsure) {
  const std::int64_t rows = p.q_len * (p.q_heads / p.kv_heads);
  const std::int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  const std::int64_t tasks = blocks * p.kv_heads;
#pragma omp parallel if (rows * p.kv_heads * p.kv_len > 4096)
  {
    RowBlock<Real> block(p);
#pragma omp for schedule(dynamic)
    for (std::int64_t task = 0; task < tasks; ++task) {
      const std::int64_t first = task % blocks * kRowBlock;
      block.compute(static_cast<int>(task / blocks), first, std::min<std::int64_t>(kRowBlock, rows - first),
                    q, k, v, out, lse, unsure);
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

float round_to(DType dtype, float x) {
  if (dtype == DType::kFloat32 || !std::isfinite(x) || x == 0) return x;
  const int precision = dtype == DType::kBFloat16 ? 8 : 11;   // significant bits
  const int lowest = dtype == DType::kBFloat16 ? -133 : -24;  // exponent of the smallest subnormal
  const double limit = dtype == DType::kBFloat16 ? std::ldexp(255.0, 120) : 65504.0;
  int exponent = 0;
  std::frexp(static_cast<double>(x), &exponent);
  const int unit = std::max(exponent - precision, lowest);
  // nearbyint rounds ties to even in the default mode; the scaled value is exact in double.
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(x), -unit)), unit);
  if (std::abs(rounded) > limit) return std::copysign(std::numeric_limits<float>::infinity(), x);
  return static_cast<float>(rounded);
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
