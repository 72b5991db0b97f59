#include "convert.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <unistd.h>

#include <new>
#include <string>
#include <utility>

namespace halftone::python {
namespace {

[[noreturn]] void invalid(const std::string& sentence) { throw Error(ErrorCode::kInvalidArgument, sentence); }

std::string dtype_text(DLDataType t) {
  const int bits = t.bits;  // of 8 bits itself: fmt would print a character
  const std::string lanes = t.lanes == 1 ? "" : fmt::format("x{}", static_cast<int>(t.lanes));
  switch (t.code) {
    case kDLInt:
      return fmt::format("int{}{}", bits, lanes);
    case kDLUInt:
      return fmt::format("uint{}{}", bits, lanes);
    case kDLFloat:
      return fmt::format("float{}{}", bits, lanes);
    case kDLBfloat:
      return fmt::format("bfloat{}{}", bits, lanes);
    case kDLBool:
      return "bool";
    default:
      return fmt::format("DLPack type {} of {} bits{}", static_cast<int>(t.code), bits, lanes);
  }
}

DType to_dtype(DLDataType t, std::string_view name) {
  if (t.lanes == 1) {
    if (t.code == kDLFloat && t.bits == 32) return DType::kFloat32;
    if (t.code == kDLFloat && t.bits == 16) return DType::kFloat16;
    if (t.code == kDLBfloat && t.bits == 16) return DType::kBFloat16;
    if (t.code == kDLFloat8_e4m3fn && t.bits == 8) return DType::kFloat8E4M3;
    if (t.code == kDLInt && t.bits == 8) return DType::kInt8;
    if (t.code == kDLInt && t.bits == 32) return DType::kInt32;
    if (t.code == kDLInt && t.bits == 64) return DType::kInt64;
    if (t.code == kDLUInt && t.bits == 8) return DType::kUInt8;
  }
  invalid(fmt::format(
      "{}.dtype is {}, but halftone takes f32, f16, bf16, uint8, int32 and int64 arrays: convert it.", name,
      dtype_text(t)));
}

const DLTensor* tensor_of(ffi::AnyView value) {
  const std::optional<DLTensor*> tensor = value.try_cast<DLTensor*>();
  return tensor.has_value() ? *tensor : nullptr;
}

/// What C++ and Python call the same thing; longer names before those that they contain.
constexpr std::pair<std::string_view, std::string_view> kPythonNames[] = {
    {"BlockTableMode::kClamped", "clamped=True"},
    {"kClamped", "clamped=True"},
    {"Granularity::kTokenHead", "granularity token_head"},
    {" is kNone", " is 'none'"},
    {", but problem.", ", but the plan's "},
    {" = true", "=True"},
    {"cache.k_channels.offset", "cache.k_offset"},
    {"cache.k_channels.scale", "cache.k_channel_scale"},
    {"_scale.scale", "_scale"},
    {"_scale.min", "_min"},
    {"workspace_bytes()", "workspace_bytes"},
    {"pass nullptr", "pass None"},
};

std::string in_python(std::string sentence) {
  for (const auto& [ours, pythons] : kPythonNames) {
    for (auto at = sentence.find(ours); at != sentence.npos; at = sentence.find(ours, at + pythons.size())) {
      sentence.replace(at, ours.size(), pythons);
    }
  }
  return sentence;
}

}  // namespace

Device to_device(int type, int index, std::string_view name) {
  switch (type) {
    case kDLCPU:
    case kDLCUDAHost:
      return {};
    case kDLCUDA:
    case kDLCUDAManaged:
      return {DeviceType::kCuda, index};
    default:
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{} is on a device of DLPack type {}, but halftone has the CPU and CUDA: move "
                              "it to one of these.",
                              name, type));
  }
}

TensorView to_view(ffi::AnyView value, std::string_view name) {
  const DLTensor* tensor = tensor_of(value);
  if (tensor == nullptr) {
    const std::string what = value == nullptr ? "None" : "a " + value.GetTypeKey();
    invalid(fmt::format(
        "{} is {}, but must be an array that supports DLPack: pass a NumPy, torch, JAX or CuPy array.", name,
        what));
  }
  if (tensor->ndim > TensorView::kMaxRank) {
    invalid(fmt::format("{}.ndim is {}, but must be 0 to {}: merge or drop dimensions.", name, tensor->ndim,
                        TensorView::kMaxRank));
  }
  TensorView view;
  view.data = tensor->data == nullptr ? nullptr : static_cast<std::byte*>(tensor->data) + tensor->byte_offset;
  view.dtype = to_dtype(tensor->dtype, name);
  view.device = to_device(tensor->device.device_type, tensor->device.device_id, name);
  view.rank = tensor->ndim;
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = tensor->shape[i];
    view.strides[i] = tensor->strides == nullptr ? stride : tensor->strides[i];
    stride *= view.shape[i];
  }
  return view;
}

TensorView to_optional_view(ffi::AnyView value, std::string_view name) {
  return value == nullptr ? TensorView{} : to_view(value, name);
}

PagedKv to_cache(const KvCacheSpec& spec, ffi::AnyView pages, ffi::AnyView block_table, ffi::AnyView lengths,
                 ffi::AnyView k_scale, ffi::AnyView k_min, ffi::AnyView v_scale, ffi::AnyView v_min,
                 ffi::AnyView k_offset, ffi::AnyView k_channel_scale, bool clamped) {
  PagedKv cache;
  cache.spec = spec;
  cache.pages = to_view(pages, "pages");
  cache.block_table = to_optional_view(block_table, "block_table");
  cache.lengths = to_optional_view(lengths, "lengths");
  cache.k_scale = {to_optional_view(k_scale, "k_scale"), to_optional_view(k_min, "k_min")};
  cache.v_scale = {to_optional_view(v_scale, "v_scale"), to_optional_view(v_min, "v_min")};
  cache.k_channels = {to_optional_view(k_offset, "k_offset"),
                      to_optional_view(k_channel_scale, "k_channel_scale")};
  cache.table_mode = clamped ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
  return cache;
}

void hold(ffi::AnyView value, std::vector<ffi::Tensor>& held) {
  if (auto tensor = value.try_cast<ffi::Tensor>()) held.push_back(*std::move(tensor));
}

DType to_float_dtype(std::string_view text, std::string_view name) {
  for (const DType t : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (text == dtype_name(t)) return t;
  }
  invalid(fmt::format("{} is '{}', but must be f32, f16 or bf16: choose one of them.", name, text));
}

Stream to_stream(Device device, ffi::AnyView stream) {
  if (stream != nullptr) return reinterpret_cast<Stream>(stream.cast<std::int64_t>());
  if (device.type == DeviceType::kCpu) return nullptr;
  return TVMFFIEnvGetStream(kDLCUDA, device.index);
}

bool signal_raised() noexcept {
  // Elsewhere Python runs no handler, and asking could end the thread: it needs the interpreter's lock, which
  // a process that exits never gives out.
  if (syscall(SYS_gettid) != getpid()) return false;
  return TVMFFIEnvCheckSignals() != 0;
}

void rethrow(const std::exception& error) {
  ErrorCode code = ErrorCode::kInternal;
  std::string sentence = error.what();
  if (const auto* known = dynamic_cast<const Error*>(&error)) {
    code = known->code();
  } else if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    code = ErrorCode::kResourceExhausted;
    sentence = "host memory is exhausted: free some, or use smaller shapes.";
  }
  throw ffi::Error(std::string("halftone.") + error_code_name(code), in_python(sentence), "");
}

}  // namespace halftone::python
