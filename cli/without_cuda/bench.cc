#include "cli/bench/gpu.h"
#include "halftone/error.h"

namespace halftone::cli {

std::unique_ptr<GpuBench> gpu_bench(int /*device*/, int /*repeats*/, bool /*cold_code*/) {
  throw Error(ErrorCode::kUnsupported,
              "benchmarks on a GPU need a build with the CUDA backend (HALFTONE_CUDA=ON, `make cuda`).");
}

}  // namespace halftone::cli
