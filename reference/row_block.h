// Attention of a few rows of one request: the arithmetic of the oracle.
#pragma once

#include <cstdint>
#include <memory>

#include "reference/oracle.h"

namespace halftone::reference::loops {

inline constexpr int kRowBlock = 32;  ///< rows that share a converted block of keys

/// One task: up to kRowBlock rows of one KV head.
template <class Real>
class RowBlock {
 public:
  explicit RowBlock(const OracleParams& p);

  template <class In>
  void compute(int kv_head, std::int64_t first_row, std::int64_t rows, const In* q, const In* k, const In* v,
               Real* out, Real* lse, Real* unsure);

 private:
  struct Row {
    std::int64_t query, begin, end;
    int head;
    Real inverse_sum;
  };

  template <class In>
  void scores(const In* k);
  void softmax(Real* lse, Real* unsure);
  Real code_weights(const Row& row, Real* logit, Real top, Real slope) const;
  template <class In>
  void weighted_sum(const In* v, Real* out);

  const OracleParams& p_;
  int kv_head_ = 0;
  int rows_ = 0;
  std::int64_t begin_ = 0, end_ = 0;
  Row row_[kRowBlock];
  std::unique_ptr<Real[]> logits_;   // [kRowBlock, kv_len]
  std::unique_ptr<Real[]> keys_;     // [head_dim, kKeyBlock]
  std::unique_ptr<Real[]> queries_;  // [kRowBlock, head_dim]
  std::unique_ptr<Real[]> sums_;     // [kRowBlock, v_dim]
  std::unique_ptr<Real[]> values_;   // [v_dim]
};

}  // namespace halftone::reference::loops
