#include <cmath>
#include <vector>

#include "cpu/element.h"
#include "cpu/interrupt.h"
#include "cpu/merge.h"
#include "plan/merge.h"

namespace halftone::cpu {
namespace {

float lse_at(const TensorView& lse, std::int64_t row, std::int64_t head) {
  return static_cast<const float*>(lse.data)[row * lse.strides[0] + head * lse.strides[1]];
}

/// Merges one row of one head, parts in order. `values` and `sum` hold dim floats.
void merge_row(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
               const TensorView& out, const TensorView& lse, std::int64_t row, std::int64_t head,
               float* values, float* sum) {
  const int dim = static_cast<int>(out.shape[2]);
  planning::RowState total = planning::empty_state();
  for (const TensorView& part : part_lse) {
    total = planning::merge_states(total, {lse_at(part, row, head), 1.0f}).state;
  }
  std::fill_n(sum, dim, 0.0f);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const float part = lse_at(part_lse[i], row, head);
    if (part == planning::kMinusInfinity) continue;
    const float weight = std::exp(part - total.max) / total.sum;
    load_row(parts[i].dtype, row_at(parts[i], row, head), dim, values);
    for (int d = 0; d < dim; ++d) sum[d] += weight * values[d];
  }
  store_row(out.dtype, sum, dim, row_at(out, row, head));
  if (!lse.present()) return;
  static_cast<float*>(lse.data)[row * lse.strides[0] + head * lse.strides[1]] =
      planning::finish_state(total).lse;
}

}  // namespace

void merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
           const TensorView& out, const TensorView& lse) {
  const std::int64_t rows = out.shape[0], heads = out.shape[1];
  const auto dim = static_cast<std::size_t>(out.shape[2]);
  std::vector<float> buffer(2 * dim);
  Interruption interruption;
  for (std::int64_t i = 0; i < rows * heads && !interruption.poll(i); ++i) {
    merge_row(parts, part_lse, out, lse, i / heads, i % heads, buffer.data(), buffer.data() + dim);
  }
  interruption.check();
}

}  // namespace halftone::cpu
