// The backends of this build: the only place that asks which ones it has.
#include <fmt/format.h>

#include "cpu/backend.h"
#include "halftone/error.h"
#include "plan/backend.h"

#ifdef HALFTONE_WITH_CUDA
#include "cuda/backend.h"
#endif

namespace halftone::planning {

const Backend* find_backend(DeviceType type) {
  switch (type) {
    case DeviceType::kCpu:
      return &cpu::backend();
    case DeviceType::kCuda:
#ifdef HALFTONE_WITH_CUDA
      return &cuda::backend();
#else
      return nullptr;
#endif
  }
  return nullptr;
}

const Backend& backend_for(std::string_view call, Device device) {
  if (const Backend* backend = find_backend(device.type)) return *backend;
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{} was asked for {}, but this build of halftone has only the CPU backend: configure "
                  "it with -DHALFTONE_CUDA=ON, or keep the tensors on the CPU.",
                  call, device_name(device)));
}

}  // namespace halftone::planning
