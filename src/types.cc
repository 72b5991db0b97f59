#include "halftone/types.h"

#include <fmt/format.h>

#include "halftone/error.h"

namespace halftone {

std::string_view dtype_name(DType t) {
  switch (t) {
    case DType::kFloat32:
      return "f32";
    case DType::kFloat16:
      return "f16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat8E4M3:
      return "e4m3";
    case DType::kInt8:
      return "int8";
    case DType::kInt4:
      return "int4";
    case DType::kUInt8:
      return "uint8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat8E8M0:
      return "e8m0";
  }
  return "unknown";
}

std::string device_name(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

TensorView TensorView::contiguous(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                                  Device device) {
  if (shape.size() > static_cast<std::size_t>(kMaxRank)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("shape has rank {}, but must have at most {}: drop dimensions.", shape.size(), kMaxRank));
  }
  TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.device = device;
  for (const std::int64_t size : shape) view.shape[view.rank++] = size;
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.strides[i] = stride;
    // A product that wraps is caught where the view is used; here it must only not be undefined.
    if (__builtin_mul_overflow(stride, view.shape[i] > 1 ? view.shape[i] : 1, &stride)) stride = INT64_MAX;
  }
  return view;
}

}  // namespace halftone
