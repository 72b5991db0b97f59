#include "reference/row_block.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/ranges.h"

namespace halftone::reference::loops {
namespace {

constexpr int kKeyBlock = 64;

template <class Real>
std::unique_ptr<Real[]> zeros(std::int64_t count) {
  return std::unique_ptr<Real[]>(new Real[static_cast<std::size_t>(count)]());
}

}  // namespace

template <class Real>
RowBlock<Real>::RowBlock(const OracleParams& p)
    : p_(p),
      logits_(zeros<Real>(kRowBlock * p.kv_len)),
      keys_(zeros<Real>(std::int64_t{kKeyBlock} * p.head_dim)),
      queries_(zeros<Real>(std::int64_t{kRowBlock} * p.head_dim)),
      sums_(zeros<Real>(std::int64_t{kRowBlock} * p.v_dim())),
      values_(zeros<Real>(p.v_dim())) {}

template <class Real>
template <class In>
void RowBlock<Real>::compute(int kv_head, std::int64_t first_row, std::int64_t rows, const In* q, const In* k,
                             const In* v, Real* out, Real* lse, Real* unsure) {
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
    reads(source, static_cast<std::size_t>(p_.head_dim));
    for (int d = 0; d < p_.head_dim; ++d) queries_[r * p_.head_dim + d] = static_cast<Real>(source[d]);
  }
  scores(k);
  softmax(lse, unsure);
  weighted_sum(v, out);
}

/// logits_[r][j] = q_r . k_j over the union of the rows' ranges, the sum over dims in index order.
template <class Real>
template <class In>
void RowBlock<Real>::scores(const In* k) {
  for (std::int64_t j0 = begin_; j0 < end_; j0 += kKeyBlock) {
    const int n = static_cast<int>(std::min<std::int64_t>(kKeyBlock, end_ - j0));
    for (int j = 0; j < n; ++j) {
      const In* source = k + ((j0 + j) * p_.kv_heads + kv_head_) * p_.head_dim;
      reads(source, static_cast<std::size_t>(p_.head_dim));
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
template <class Real>
void RowBlock<Real>::softmax(Real* lse, Real* unsure) {
  const Real scale = p_.scale != 0 ? static_cast<Real>(p_.scale)
                                   : static_cast<Real>(1.0 / std::sqrt(static_cast<double>(p_.head_dim)));
  const Real softcap = static_cast<Real>(p_.softcap);
  for (int r = 0; r < rows_; ++r) {
    Row& row = row_[r];
    Real* logit = &logits_[r * p_.kv_len];
    Real& row_lse = lse[row.query * p_.q_heads + row.head];
    writes(&row_lse, 1);
    if (row.begin == row.end) {
      row_lse = -std::numeric_limits<Real>::infinity();
      continue;
    }
    const Real slope = p_.alibi_slopes.empty() ? Real{0} : static_cast<Real>(p_.alibi_slopes[row.head]);
    const Real position = static_cast<Real>(row.query + p_.kv_len - p_.q_len);
    const bool sink = !p_.sinks.empty();
    if (sink) reads(&p_.sinks[row.head], 1);
    if (!p_.alibi_slopes.empty()) reads(&p_.alibi_slopes[row.head], 1);
    Real top = sink ? static_cast<Real>(p_.sinks[row.head]) : -std::numeric_limits<Real>::infinity();
    for (std::int64_t j = row.begin; j < row.end; ++j) {
      Real x = logit[j] * scale;
      if (softcap > 0) x = softcap * std::tanh(x / softcap);
      if (slope != 0) x -= slope * std::abs(position - static_cast<Real>(j));
      logit[j] = x;
      top = x > top ? x : top;
    }
    Real sum = sink ? std::exp(static_cast<Real>(p_.sinks[row.head]) - top) : Real{0};
    Real& row_unsure = unsure[row.query * p_.q_heads + row.head];
    writes(&row_unsure, 1);
    if (p_.weight_tokens != 0) {
      for (std::int64_t j = row.begin; j < row.end; ++j) sum += std::exp(logit[j] - top);
      row_unsure = code_weights(row, logit, top, slope) / sum;
    } else {
      Real squares = 0;
      for (std::int64_t j = row.begin; j < row.end; ++j) {
        logit[j] = std::exp(logit[j] - top);
        sum += logit[j];
        squares += logit[j] * logit[j];
      }
      row_unsure = std::sqrt(squares) / sum;
    }
    row_lse = top + std::log(sum);
    row.inverse_sum = Real{1} / sum;
  }
}

/// Logits become weights with codes of 8 bits. Returns what of their sum hangs on the last bits of fp32: a
/// logit is a few roundings of its parts, at most 2^-20 of them, off, and so is the largest one beside it.
template <class Real>
Real RowBlock<Real>::code_weights(const Row& row, Real* logit, Real top, Real slope) const {
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

template <class Real>
template <class In>
void RowBlock<Real>::weighted_sum(const In* v, Real* out) {
  const int dim = p_.v_dim();
  std::fill_n(sums_.get(), kRowBlock * dim, Real{0});
  for (std::int64_t j = begin_; j < end_; ++j) {
    const In* source = v + (j * p_.kv_heads + kv_head_) * dim;
    reads(source, static_cast<std::size_t>(dim));
    for (int d = 0; d < dim; ++d) values_[d] = static_cast<Real>(source[d]);
    for (int r = 0; r < rows_; ++r) {
      if (j < row_[r].begin || j >= row_[r].end) continue;
      const Real weight = logits_[r * p_.kv_len + j];
      const Real* value = values_.get();
      Real* sum = &sums_[r * dim];
      for (int d = 0; d < dim; ++d) sum[d] += weight * value[d];
    }
  }
  for (int r = 0; r < rows_; ++r) {
    const Row& row = row_[r];
    Real* target = out + (row.query * p_.q_heads + row.head) * dim;
    writes(target, static_cast<std::size_t>(dim));
    for (int d = 0; d < dim; ++d) {
      target[d] = row.begin == row.end ? Real{0} : sums_[r * dim + d] * row.inverse_sum;
    }
  }
}

template class RowBlock<float>;
template class RowBlock<double>;
template void RowBlock<float>::compute(int, std::int64_t, std::int64_t, const float*, const float*,
                                       const float*, float*, float*, float*);
template void RowBlock<double>::compute(int, std::int64_t, std::int64_t, const float*, const float*,
                                        const float*, double*, double*, double*);
template void RowBlock<double>::compute(int, std::int64_t, std::int64_t, const double*, const double*,
                                        const double*, double*, double*, double*);

}  // namespace halftone::reference::loops
