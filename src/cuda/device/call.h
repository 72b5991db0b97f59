// What the host half of the backend needs around a launch.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <string_view>

#include "halftone/error.h"
#include "halftone/types.h"

namespace halftone::cuda {

/// Throws DeviceError unless `status` is cudaSuccess.
inline void check(int status, std::string_view call) {
  if (status == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(status);
  throw Error(ErrorCode::kDeviceError,
              fmt::format("{} failed with {} ({}): check the device and the pointers' device.", call,
                          cudaGetErrorName(error), cudaGetErrorString(error)));
}

/// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device_ != before_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (device_ != before_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int device_;
  int before_ = 0;
};

template <class T>
const T* pointer(const TensorView& t) {
  return static_cast<const T*>(t.data);
}

inline int log2_of(int power_of_two) { return std::countr_zero(static_cast<unsigned>(power_of_two)); }

inline bool aligned_to_16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

/// True if every row of a rank-3 f32, f16 or bf16 view begins at a multiple of 16 bytes.
inline bool rows_aligned(const TensorView& t) {
  const std::int64_t vector = 16 / (dtype_bits(t.dtype) / 8);
  return aligned_to_16(t.data) && t.strides[0] % vector == 0 && t.strides[1] % vector == 0;
}

}  // namespace halftone::cuda
