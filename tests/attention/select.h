// Some requests of a problem as a problem of their own, for tests of what a request owes to its neighbours.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "testing/cases.h"

namespace halftone::testing {

/// The rows of the requests `chosen` of `x`, of which request i has [first[i], first[i + 1]).
inline Tensor rows_of(const Tensor& x, const std::vector<std::int64_t>& first,
                      const std::vector<std::size_t>& chosen) {
  std::vector<std::int64_t> shape = x.shape();
  shape[0] = 0;
  for (const std::size_t i : chosen) shape[0] += first[i + 1] - first[i];
  Tensor rows(x.dtype(), shape);
  const std::int64_t row = shape[1] * shape[2] * dtype_bits(x.dtype()) / 8;
  auto to = rows.bytes().begin();
  for (const std::size_t i : chosen) {
    const auto from = x.bytes().subspan(static_cast<std::size_t>(first[i] * row),
                                        static_cast<std::size_t>((first[i + 1] - first[i]) * row));
    to = std::copy(from.begin(), from.end(), to);
  }
  return rows;
}

/// The requests `chosen` of `p`, in that order, over copies of the same tensors.
inline Problem select(const Problem& p, const std::vector<std::size_t>& chosen, bool own_bounds) {
  AttentionCase row = p.row;
  row.requests.clear();
  for (const std::size_t i : chosen) row.requests.push_back(p.row.requests[i]);
  row.cu_q = true;
  Problem s;
  s.row = row;
  s.problem = p.problem;
  s.problem.batch = static_cast<int>(chosen.size());
  std::vector<std::int64_t> first_q = {0}, first_kv = {0};
  for (const Request& r : p.row.requests) {
    first_q.push_back(first_q.back() + r.q_len);
    first_kv.push_back(first_kv.back() + r.kv_len);
  }
  std::vector<std::int32_t> cu_q = {0}, cu_kv = {0}, table, lengths;
  if (own_bounds) s.problem.max_q_len = s.problem.max_kv_len = 1;
  for (const std::size_t i : chosen) {
    const Request& r = p.row.requests[i];
    cu_q.push_back(cu_q.back() + r.q_len);
    cu_kv.push_back(cu_kv.back() + r.kv_len);
    if (own_bounds) {
      s.problem.max_q_len = std::max(s.problem.max_q_len, r.q_len);
      s.problem.max_kv_len = std::max(s.problem.max_kv_len, r.kv_len);
    }
    if (p.row.plain) continue;
    const auto columns = static_cast<std::size_t>(p.cache->block_table.shape()[1]);
    const auto source = p.cache->block_table.as<std::int32_t>().subspan(i * columns, columns);
    table.insert(table.end(), source.begin(), source.end());
    lengths.push_back(r.kv_len);
  }
  const auto batch = static_cast<std::int64_t>(chosen.size());
  s.cu_q = Tensor::of({batch + 1}, cu_q);
  s.q = rows_of(p.q, first_q, chosen);
  s.alibi_slopes = p.alibi_slopes.clone();
  s.sinks = p.sinks.clone();
  if (!p.row.plain) {
    s.cache = std::make_unique<Cache>(p.cache->clone());
    s.cache->block_table = Tensor::of({batch, p.cache->block_table.shape()[1]}, table);
    s.cache->lengths = Tensor::of({batch}, lengths);
  } else {
    s.cu_kv = Tensor::of({batch + 1}, cu_kv);
  }
  if (p.k.present()) {
    s.k = rows_of(p.k, first_kv, chosen);
    s.v = rows_of(p.v, first_kv, chosen);
  }
  return s;
}

/// The bytes of one request's rows.
inline std::vector<std::uint8_t> request_bytes(const Problem& p, const Tensor& x, std::size_t request) {
  std::int64_t first = 0;
  for (std::size_t i = 0; i < request; ++i) first += p.row.requests[i].q_len;
  const std::size_t row = x.bytes().size() / static_cast<std::size_t>(p.total_q());
  const auto bytes = x.bytes().subspan(static_cast<std::size_t>(first) * row,
                                       static_cast<std::size_t>(p.row.requests[request].q_len) * row);
  return {bytes.begin(), bytes.end()};
}

}  // namespace halftone::testing
