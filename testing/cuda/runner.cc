// The runner of the GPU.
#include <cmath>

#include "testing/cuda/limits.h"
#include "testing/cuda/memory.h"
#include "testing/runners.h"

namespace halftone::testing {
namespace {

class CudaRunner final : public Runner {
 public:
  std::string_view name() const override { return "cuda"; }
  Device device() const override { return {DeviceType::kCuda, 0}; }
  std::unique_ptr<Place> place() const override { return std::make_unique<Uploads>(); }
  bool checks_values() const override { return false; }
  std::string judge(const Problem& p, const Outputs& outputs) const override {
    const Reference reference = make_reference(p, false);
    const PlanInfo info = plan(p).info();
    if (info.config == kUniversalConfig) {
      return testing::judge(p, reference, outputs, universal_lse_slack(p), universal_out_slack(p));
    }
    return testing::judge(p, reference, outputs, lse_slack(p, info), out_slack(p, info));
  }
};

}  // namespace

const Runner& cuda_runner() {
  static const CudaRunner runner;
  return runner;
}

const Runner* usable_cuda_runner() {
  int count = 0, major = 0, minor = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess;
  (void)cudaGetLastError();
  return found && major == 9 && minor == 0 ? &cuda_runner() : nullptr;
}

}  // namespace halftone::testing
