// The runner of the GPU.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "testing/cuda/limits.h"
#include "testing/cuda/memory.h"
#include "testing/runners.h"

namespace halftone::testing {
namespace {

/// The truth; of requests whose keys a pass stages the one about what is staged: that it is rounded is no
/// error of the kernel's.
Reference reference_of(const Problem& p, const PlanInfo& info) {
  const PassInfo& last = info.passes.back();
  if (last.staged_bytes == 0) return make_reference(p);
  Reference reference = make_reference(p, true);
  if (info.passes.size() == 1) return reference;
  const Reference exact = make_reference(p);
  std::int64_t first = 0;
  for (const Request& r : p.row.requests) {
    const std::int64_t count = std::int64_t{r.q_len} * p.row.q_heads;
    if (r.q_len * info.group < last.min_rows) {
      const auto take = [&](auto& to, const auto& from, std::int64_t width) {
        std::copy_n(from.begin() + first * width, count * width, to.begin() + first * width);
      };
      take(reference.out, exact.out, p.problem.v_dim());
      take(reference.plain_out, exact.plain_out, p.problem.v_dim());
      take(reference.lse, exact.lse, 1);
      take(reference.plain_lse, exact.plain_lse, 1);
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
