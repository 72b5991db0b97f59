#include "cli/cuda/projections.h"

#include <cmath>
#include <vector>

#include "cli/cuda/gemm_kernel.h"
#include "cli/cuda/tensors.h"
#include "reference/random.h"

namespace halftone::cli::cuda {

Projections::Projections(int width, int rows, int layers)
    : width_(width),
      rows_(rows),
      weights_(std::int64_t{2} * layers * width * width),
      x_(device_activations(DType::kBFloat16, rows, 1, width, 7)) {
  std::vector<float> values(std::size_t{1} << 22);  // repeated
  reference::Random random(8);
  random.normals(values);
  for (float& value : values) value /= std::sqrt(static_cast<float>(width));
  const auto count = static_cast<std::int64_t>(values.size());
  fill_with(weights_.data(), weights_.bytes(),
            reference::Tensor::of(DType::kBFloat16, {count}, values).bytes());
}

void Projections::enqueue(int layer, void* out, Stream stream) const {
  Gemm gemm;
  gemm.x = x_.data();
  gemm.weights = weights_.data() + std::int64_t{2} * layer * width_ * width_;
  gemm.out = out;
  gemm.rows = rows_;
  gemm.columns = gemm.depth = width_;
  check(launch_gemm(gemm, stream), "a GEMM");
}

}  // namespace halftone::cli::cuda
