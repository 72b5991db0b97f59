// Basic vocabulary: element types, devices, tensor views and streams.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#define HALFTONE_API __attribute__((visibility("default")))

namespace halftone {

/// Element type of a tensor or of a cache. kInt4 packs two values in a byte and occurs only inside a cache.
enum class DType : std::uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  ///< OCP E4M3: no infinities, largest value 448, 0x7f and 0xff are NaN
  kInt8,
  kInt4,
  kUInt8,
  kInt32,
  kInt64,
  kFloat8E8M0,  ///< OCP E8M0, a power of two from 2^-127 to 2^127; 0xff is NaN. A scale, never a value
};

/// Size of one element in bits (4 for kInt4).
constexpr int dtype_bits(DType t) {
  switch (t) {
    case DType::kFloat32:
    case DType::kInt32:
      return 32;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 16;
    case DType::kFloat8E4M3:
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kFloat8E8M0:
      return 8;
    case DType::kInt4:
      return 4;
    case DType::kInt64:
      return 64;
  }
  return 0;
}

/// "f32", "f16", "bf16", "e4m3", "int8", "int4", "uint8", "int32", "int64", "e8m0".
HALFTONE_API std::string_view dtype_name(DType t);

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend constexpr bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda:<index>".
HALFTONE_API std::string device_name(Device device);

/// A cudaStream_t on a CUDA device; must be null on the CPU, where every call has finished when it returns.
using Stream = void*;

/// A view of memory that the caller owns, in the manner of DLPack. A default-constructed view is "absent".
struct TensorView {
  static constexpr int kMaxRank = 5;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device{};
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};  ///< in elements

  /// A row-major view of `shape`. `data` may point to const memory when the callee only reads it.
  static HALFTONE_API TensorView contiguous(const void* data, DType dtype,
                                            std::initializer_list<std::int64_t> shape, Device device = {});

  bool present() const { return data != nullptr; }
  std::int64_t numel() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
};

}  // namespace halftone
