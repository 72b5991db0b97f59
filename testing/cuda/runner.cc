// The runner of the GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "testing/cuda/limits.h"
#include "testing/cuda/memory.h"
#include "testing/runners.h"

namespace halftone::testing {
namespace {

/// The problem over K and V as prefill's kernel reads them where run() stages them: dequantised, in bf16.
Problem over_staged(const Problem& p) {
  const Dequantised d = dequantised(*p.cache);
  Problem twin;
  twin.row = p.row;
  twin.row.plain = DType::kBFloat16;
  twin.problem = p.problem;
  twin.q = p.q.clone();
  twin.k = Tensor::of(DType::kBFloat16, d.k.shape(), d.k.to_floats());
  twin.v = Tensor::of(DType::kBFloat16, d.v.shape(), d.v.to_floats());
  if (p.alibi_slopes.present()) twin.alibi_slopes = p.alibi_slopes.clone();
  if (p.sinks.present()) twin.sinks = p.sinks.clone();
  return twin;
}

/// The truth, of requests that a pass stages about what is staged: that it is rounded is no error of the
/// kernel's.
Reference reference_of(const Problem& p, const PlanInfo& info) {
  Reference reference = make_reference(p);
  const PassInfo& last = info.passes.back();
  if (last.staged_bytes == 0) return reference;
  const Reference staged = make_reference(over_staged(p));
  std::int64_t first = 0;
  const auto take = [&](auto& to, const auto& from, std::int64_t count, std::int64_t width) {
    std::copy_n(from.begin() + first * width, count * width, to.begin() + first * width);
  };
  for (const Request& r : p.row.requests) {
    const std::int64_t count = std::int64_t{r.q_len} * p.row.q_heads;
    if (r.q_len * info.group >= last.min_rows) {
      take(reference.out, staged.out, count, p.problem.v_dim());
      take(reference.plain_out, staged.plain_out, count, p.problem.v_dim());
      take(reference.lse, staged.lse, count, 1);
      take(reference.plain_lse, staged.plain_lse, count, 1);
    }
    first += count;
  }
  return reference;
}

class CudaRunner final : public Runner {
 public:
  std::string_view name() const override { return "cuda"; }
  Device device() const override { return {DeviceType::kCuda, 0}; }
  std::unique_ptr<Place> place() const override { return std::make_unique<Uploads>(); }
  bool checks_values() const override { return false; }
  std::string judge(const Problem& p, const Outputs& outputs) const override {
    const PlanInfo info = plan(p).info();
    const Reference reference = reference_of(p, info);
    if (info.config == kUniversalConfig) {
      return testing::judge(p, reference, outputs, kUniversalLseSlack);
    }
    return testing::judge(p, reference, outputs, kLseSlack, out_slack(p, info));
  }
};

}  // namespace

const Runner& cuda_runner() {
  static const CudaRunner runner;
  return runner;
}

bool has_cuda_runner() {
  int count = 0, major = 0, minor = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess;
  (void)cudaGetLastError();
  return found && major == 9 && minor == 0;
}

}  // namespace halftone::testing
