// The C ABI over formats and caches: every function translates, calls the C++ API and maps what it throws.
#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "c_api/convert.h"
#include "c_api/struct.h"
#include "c_api/traits.h"
#include "halftone/cache.h"
#include "halftone/error.h"
#include "halftone/format.h"
#include "halftone/halftone.h"

namespace halftone::c_api {
namespace {

static_assert(HALFTONE_INVALID_ARGUMENT == int(ErrorCode::kInvalidArgument) &&
              HALFTONE_UNSUPPORTED == int(ErrorCode::kUnsupported) &&
              HALFTONE_OUT_OF_RANGE == int(ErrorCode::kOutOfRange) &&
              HALFTONE_CORRUPT_FILE == int(ErrorCode::kCorruptFile) &&
              HALFTONE_RESOURCE_EXHAUSTED == int(ErrorCode::kResourceExhausted) &&
              HALFTONE_DEVICE_ERROR == int(ErrorCode::kDeviceError) &&
              HALFTONE_INTERNAL == int(ErrorCode::kInternal));

constexpr std::int32_t kDTypes = HALFTONE_DTYPE_E8M0 + 1;

void check_not_null(const void* pointer, const char* argument, const char* what) {
  if (pointer == nullptr)
    invalid(fmt::format("{} is NULL, but must point to {}: pass its address.", argument, what));
}

/// The public list with NUL-terminated strings.
struct NamedEntry {
  std::string name;
  std::string description;
  KvFormat format;
};
const std::vector<NamedEntry>& named_entries() {
  static const std::vector<NamedEntry> entries = [] {
    std::vector<NamedEntry> list;
    for (const NamedFormat& f : named_formats()) {
      list.push_back({std::string(f.name), std::string(f.description), f.format});
    }
    return list;
  }();
  return entries;
}

/// A row-major view of `shape`, as halftone_tensor_init() documents it.
halftone_tensor row_major(const void* data, std::int32_t dtype, std::int32_t rank,
                          const std::int64_t* shape) {
  auto tensor = zeroed<halftone_tensor>();
  tensor.dtype = static_cast<std::int32_t>(to_dtype(dtype, "dtype"));
  if (rank < 0 || rank > HALFTONE_MAX_RANK) {
    invalid(
        fmt::format("rank is {}, but must be 0 to {}: merge or drop dimensions.", rank, HALFTONE_MAX_RANK));
  }
  if (rank > 0) check_not_null(shape, "shape", "rank extents");
  tensor.data = const_cast<void*>(data);
  tensor.rank = rank;
  std::int64_t stride = 1;
  for (std::int32_t i = rank - 1; i >= 0; --i) {
    const std::int64_t extent = shape[i];
    if (extent < 0) {
      invalid(
          fmt::format("shape[{}] is {}, but must be at least 0: give the number of elements.", i, extent));
    }
    tensor.shape[i] = extent;
    tensor.strides[i] = stride;
    if (extent > 0 && stride > std::numeric_limits<std::int64_t>::max() / extent) {
      invalid(fmt::format(
          "shape[{}] is {}, but with the extents after it at most {} fit 64 bits: check the shape.", i,
          extent, std::numeric_limits<std::int64_t>::max() / stride));
    }
    stride *= extent > 0 ? extent : 1;
  }
  return tensor;
}

/// Checks where halftone_calibrate() writes: f32 [count], contiguous, on the CPU.
void check_scales(const TensorView& out, const char* argument, std::int64_t count) {
  if (!out.present())
    invalid(fmt::format("{} is absent, but the format needs it: pass f32 [{}].", argument, count));
  if (out.dtype != DType::kFloat32) {
    invalid(fmt::format("{}.dtype is {}, but must be f32: pass f32 [{}].", argument, dtype_name(out.dtype),
                        count));
  }
  if (out.device.type != DeviceType::kCpu) {
    invalid(
        fmt::format("{} is on {}, but must be on cpu: pass host memory.", argument, device_name(out.device)));
  }
  if (out.rank != 1 || out.shape[0] != count || (count > 1 && out.strides[0] != 1)) {
    invalid(fmt::format("{} has rank {} and {} elements, but must be a contiguous [{}]: pass f32 [{}].",
                        argument, out.rank, out.numel(), count, count));
  }
}

void copy_values(const std::vector<float>& values, const TensorView& out) {
  std::memcpy(out.data, values.data(), values.size() * sizeof(float));
}

/// Where halftone_calibrate_channels() writes: f32 [heads, dim], contiguous, on the CPU.
void check_channels(const TensorView& out, const char* argument, std::int64_t heads, std::int64_t dim) {
  TensorView flat = out;
  if (out.rank == 2 && out.shape[0] == heads && out.shape[1] == dim && (heads < 2 || out.strides[0] == dim)) {
    flat.rank = 1;
    flat.shape[0] = heads * dim;
    flat.strides[0] = out.strides[1];
  } else if (out.present()) {
    invalid(
        fmt::format("{} is no contiguous [{}, {}]: pass f32 [{}, {}].", argument, heads, dim, heads, dim));
  }
  check_scales(flat, argument, heads * dim);
}

}  // namespace
}  // namespace halftone::c_api

using namespace halftone;
using namespace halftone::c_api;

extern "C" {

const char* halftone_version(void) { return HALFTONE_VERSION; }

uint32_t halftone_abi_version(void) { return HALFTONE_ABI_VERSION; }

const char* halftone_status_name(int32_t status) {
  if (status == HALFTONE_OK) return "OK";
  if (status < HALFTONE_INVALID_ARGUMENT || status > HALFTONE_INTERNAL) return "Unknown";
  return error_code_name(static_cast<ErrorCode>(status));
}

const char* halftone_dtype_name(int32_t dtype) {
  static const std::array<std::string, kDTypes> names = [] {
    std::array<std::string, kDTypes> list;
    for (int i = 0; i < kDTypes; ++i) list[i] = std::string(dtype_name(static_cast<DType>(i)));
    return list;
  }();
  return dtype < 0 || dtype >= kDTypes ? nullptr : names[dtype].c_str();
}

int32_t halftone_dtype_bits(int32_t dtype) {
  return dtype < 0 || dtype >= kDTypes ? 0 : dtype_bits(static_cast<DType>(dtype));
}

halftone_status halftone_device_name(int32_t device_type, int32_t device_index, char* buffer, size_t capacity,
                                     size_t* length) {
  return guarded([&] {
    copy_text(device_name(to_device(device_type, device_index, "device")), buffer, capacity, length);
  });
}

halftone_status halftone_tensor_init(halftone_tensor* tensor, size_t struct_size, const void* data,
                                     int32_t dtype, int32_t rank, const int64_t* shape) {
  return guarded([&] {
    check_size(tensor, struct_size, StructTraits<halftone_tensor>::rule, "tensor");
    store_struct(tensor, struct_size, row_major(data, dtype, rank, shape));
  });
}

halftone_status halftone_kv_format_init(halftone_kv_format* format, size_t struct_size) {
  return guarded([&] { init_struct(format, struct_size, "format"); });
}

halftone_status halftone_kv_format_parse(const char* text, halftone_kv_format* format) {
  return guarded([&] {
    check_not_null(text, "text", "a format name");
    write_struct(format, "format", [&] { return to_c(parse_format(text)); });
  });
}

halftone_status halftone_kv_format_name(const halftone_kv_format* format, char* buffer, size_t capacity,
                                        size_t* length) {
  return guarded([&] { copy_text(format_name(to_cpp(format, "format")), buffer, capacity, length); });
}

halftone_status halftone_kv_format_check(const halftone_kv_format* format, int32_t head_dim,
                                         const char* argument) {
  return guarded([&] {
    const char* name = argument != nullptr ? argument : "format";
    check_format(to_cpp(format, name), head_dim, name);
  });
}

size_t halftone_named_format_count(void) { return named_formats().size(); }

halftone_status halftone_named_format_get(size_t index, halftone_kv_format* format, const char** name,
                                          const char** description) {
  return guarded([&] {
    const std::vector<NamedEntry>& entries = named_entries();
    if (index >= entries.size()) {
      throw Error(ErrorCode::kOutOfRange,
                  fmt::format("index is {}, but there are {} named formats: use 0 to {}.", index,
                              entries.size(), entries.size() - 1));
    }
    const NamedEntry& entry = entries[index];
    if (format != nullptr) write_struct(format, "format", [&] { return to_c(entry.format); });
    if (name != nullptr) *name = entry.name.c_str();
    if (description != nullptr) *description = entry.description.c_str();
  });
}

halftone_status halftone_cache_spec_init(halftone_cache_spec* spec, size_t struct_size) {
  return guarded([&] { init_struct(spec, struct_size, "spec"); });
}

halftone_status halftone_cache_spec_latent(halftone_cache_spec* spec, const halftone_kv_format* format,
                                           int32_t latent_dim, int32_t rope_dim) {
  return guarded([&] {
    auto made = read_struct(spec, "spec");
    made.k_format = made.v_format = format;
    made.kv_heads = 1;
    made.head_dim = made.v_head_dim = latent_dim;
    if (rope_dim > 0 && latent_dim <= INT32_MAX - rope_dim) made.head_dim += rope_dim;
    made.rope_dim = rope_dim;
    write_struct(spec, "spec", [&] { return made; });
  });
}

halftone_status halftone_page_layout_init(halftone_page_layout* layout, size_t struct_size) {
  return guarded([&] { init_struct(layout, struct_size, "layout"); });
}

halftone_status halftone_cache_page_layout(const halftone_cache_spec* spec, halftone_page_layout* layout) {
  return guarded([&] {
    write_struct(layout, "layout", [&] {
      const PageLayout l = page_layout(to_cpp(spec, "spec"));
      auto out = zeroed<halftone_page_layout>();
      out.k_data_bytes = l.k_data_bytes;
      out.v_data_bytes = l.v_data_bytes;
      out.k_param_bytes = l.k_param_bytes;
      out.v_param_bytes = l.v_param_bytes;
      out.v_data_offset = l.v_data_offset;
      out.k_param_offset = l.k_param_offset;
      out.v_param_offset = l.v_param_offset;
      out.tile_bytes = l.tile_bytes;
      out.head_bytes = l.head_bytes;
      out.page_bytes = l.page_bytes;
      out.row_bytes = l.row_bytes;
      return out;
    });
  });
}

halftone_status halftone_cache_bytes_per_token(const halftone_cache_spec* spec, double* bytes) {
  return guarded([&] {
    check_not_null(bytes, "bytes", "a double");
    *bytes = bytes_per_token(to_cpp(spec, "spec"));
  });
}

halftone_status halftone_paged_kv_init(halftone_paged_kv* cache, size_t struct_size) {
  return guarded([&] { init_struct(cache, struct_size, "cache"); });
}

halftone_status halftone_append_args_init(halftone_append_args* args, size_t struct_size) {
  return guarded([&] { init_struct(args, struct_size, "args"); });
}

halftone_status halftone_append(const halftone_paged_kv* cache, const halftone_append_args* args,
                                void* stream) {
  return guarded([&] {
    const PagedKv view = to_cpp(cache, "cache");
    append(view, to_cpp(args, "args"), stream);
  });
}

halftone_status halftone_dequantize(const halftone_paged_kv* cache, const halftone_tensor* k_out,
                                    const halftone_tensor* v_out, void* stream) {
  return guarded([&] {
    const PagedKv view = to_cpp(cache, "cache");
    const TensorView k = to_cpp(k_out, "k_out");
    dequantize(view, k, to_cpp(v_out, "v_out"), stream);
  });
}

halftone_status halftone_calibrate(const halftone_tensor* x, const halftone_kv_format* format, int32_t rotate,
                                   const halftone_tensor* scale, const halftone_tensor* min) {
  return guarded([&] {
    const TensorView input = to_cpp(x, "x");
    const KvFormat f = to_cpp(format, "format");
    const TensorView scales = to_cpp(scale, "scale");
    const TensorView mins = to_cpp(min, "min");
    const bool rotated = to_bool(rotate, "rotate");
    if (f.static_scale() && input.rank == 3) {  // calibrate() itself refuses everything else
      const std::int64_t count = f.granularity == Granularity::kHead ? input.shape[1] : 1;
      check_scales(scales, "scale", count);
      if (f.asymmetric) check_scales(mins, "min", count);
      if (!f.asymmetric && mins.present()) {
        invalid(fmt::format("min is present, but {} is symmetric and has none: pass NULL.", format_name(f)));
      }
    }
    const StaticScaleValues values = calibrate(input, f, rotated);
    copy_values(values.scale, scales);
    if (f.asymmetric) copy_values(values.min, mins);
  });
}

halftone_status halftone_calibrate_channels(const halftone_tensor* k, const halftone_kv_format* format,
                                            int32_t rotate, const halftone_tensor* q,
                                            const halftone_tensor* offset, const halftone_tensor* scale,
                                            int32_t* offset_k, int32_t* scale_k) {
  return guarded([&] {
    const TensorView sample = to_cpp(k, "k");
    const KvFormat f = to_cpp(format, "format");
    const TensorView offsets = to_cpp(offset, "offset"), scales = to_cpp(scale, "scale");
    check_not_null(offset_k, "offset_k", "an int32_t");
    check_not_null(scale_k, "scale_k", "an int32_t");
    const bool rotated = to_bool(rotate, "rotate");
    if (sample.rank == 3) {  // calibrate_channels() itself refuses everything else
      check_channels(offsets, "offset", sample.shape[1], sample.shape[2]);
      check_channels(scales, "scale", sample.shape[1], sample.shape[2]);
    }
    ChannelValues values = calibrate_channels(sample, f, rotated, to_cpp(q, "q"));
    *offset_k = values.offset.empty() ? 0 : 1;
    *scale_k = values.scale.empty() ? 0 : 1;
    const auto channels = static_cast<std::size_t>(sample.shape[1] * sample.shape[2]);
    values.offset.resize(channels, 0.0f);
    values.scale.resize(channels, 1.0f);
    copy_values(values.offset, offsets);
    copy_values(values.scale, scales);
  });
}

halftone_status halftone_import_fbgemm_int4(const halftone_paged_kv* cache, int32_t part,
                                            const halftone_tensor* rows, const halftone_tensor* slots) {
  return guarded([&] {
    const PagedKv view = to_cpp(cache, "cache");
    const KvPart which = to_part(part, "part");
    const TensorView rows_view = to_cpp(rows, "rows");
    import_fbgemm_int4(view, which, rows_view, to_cpp(slots, "slots"));
  });
}

halftone_status halftone_export_fbgemm_int4(const halftone_paged_kv* cache, int32_t part,
                                            const halftone_tensor* slots, const halftone_tensor* rows) {
  return guarded([&] {
    const PagedKv view = to_cpp(cache, "cache");
    const KvPart which = to_part(part, "part");
    const TensorView slots_view = to_cpp(slots, "slots");
    export_fbgemm_int4(view, which, slots_view, to_cpp(rows, "rows"));
  });
}

}  // extern "C"
