// Formats, geometry, caches and what writes and reads them: the functions that halftone/_native.py loads.
#include <tvm/ffi/tvm_ffi.h>

#include <string>

#include "convert.h"
#include "halftone/halftone.h"
#include "objects.h"
#include "plan/backend.h"

namespace halftone::python {
namespace {

using ffi::AnyView;
using ffi::Array;
using ffi::Map;
using ffi::String;

std::string_view text_of(const String& text) { return {text.data(), text.size()}; }

const char* granularity_name(Granularity g) {
  switch (g) {
    case Granularity::kNone:
      return "none";
    case Granularity::kTensor:
      return "tensor";
    case Granularity::kHead:
      return "head";
    case Granularity::kToken:
      return "token";
    case Granularity::kTokenHead:
      return "token_head";
    case Granularity::kGroup:
      return "group";
  }
  return "?";
}

String version() { return halftone_version(); }

bool has_cuda() { return planning::find_backend(DeviceType::kCuda) != nullptr; }

Map<String, ffi::Any> format_info(const String& text) {
  return guarded([&] {
    const KvFormat format = parse_format(text_of(text));
    Map<String, ffi::Any> info;
    info.Set("name", String(format_name(format)));
    info.Set("dtype", String(std::string(dtype_name(format.dtype))));
    info.Set("granularity", String(granularity_name(format.granularity)));
    info.Set("asymmetric", format.asymmetric);
    info.Set("group_size", format.group_size);
    info.Set("scale_dtype", String(std::string(dtype_name(format.scale_dtype))));
    info.Set("static_scale", format.static_scale());
    return info;
  });
}

Array<String> formats() {
  Array<String> list;
  for (const NamedFormat& f : named_formats()) {
    list.push_back(String(std::string(f.name)));
    list.push_back(String(std::string(f.description)));
  }
  return list;
}

Ref<SpecObj> make_spec(const String& k_format, const String& v_format, int kv_heads, int head_dim,
                       int v_head_dim, int page_size, bool rotate_k, bool rotate_v, int rope_dim,
                       bool offset_k, bool scale_k) {
  return guarded([&] {
    const KvCacheSpec spec{.k_format = parse_format(text_of(k_format)),
                           .v_format = parse_format(text_of(v_format)),
                           .kv_heads = kv_heads,
                           .head_dim = head_dim,
                           .v_head_dim = v_head_dim,
                           .page_size = page_size,
                           .rotate_k = rotate_k,
                           .rotate_v = rotate_v,
                           .rope_dim = rope_dim,
                           .offset_k = offset_k,
                           .scale_k = scale_k};
    page_layout(spec);  // every error of a geometry
    return Ref<SpecObj>(ffi::make_object<SpecObj>(spec));
  });
}

Map<String, std::int64_t> layout(const Ref<SpecObj>& spec) {
  return guarded([&] {
    const PageLayout l = page_layout(spec->spec);
    Map<String, std::int64_t> fields;
    for (const auto& [name, value] :
         std::initializer_list<std::pair<const char*, std::int64_t>>{{"k_data_bytes", l.k_data_bytes},
                                                                     {"v_data_bytes", l.v_data_bytes},
                                                                     {"k_param_bytes", l.k_param_bytes},
                                                                     {"v_param_bytes", l.v_param_bytes},
                                                                     {"v_data_offset", l.v_data_offset},
                                                                     {"k_param_offset", l.k_param_offset},
                                                                     {"v_param_offset", l.v_param_offset},
                                                                     {"tile_bytes", l.tile_bytes},
                                                                     {"head_bytes", l.head_bytes},
                                                                     {"page_bytes", l.page_bytes},
                                                                     {"row_bytes", l.row_bytes}}) {
      fields.Set(name, value);
    }
    return fields;
  });
}

/// Of each span: its format, then dims, rotate, in_rows, k_first, v_first, data_offset and param_offset.
Array<ffi::Any> spans(const Ref<SpecObj>& spec) {
  return guarded([&] {
    const PageLayout l = page_layout(spec->spec);
    Array<ffi::Any> list;
    for (const KvSpan& span : spec->spec.spans()) {
      const SpanLayout& at = l.spans[list.size() / 8];
      list.push_back(String(format_name(span.format)));
      for (const std::int64_t value :
           {std::int64_t{span.dims}, std::int64_t{span.rotate}, std::int64_t{span.order == KvOrder::kRows},
            std::int64_t{span.k_first}, std::int64_t{span.v_first}, at.data_offset, at.param_offset}) {
        list.push_back(value);
      }
    }
    return list;
  });
}

Ref<CacheObj> make_cache(const Ref<SpecObj>& spec, AnyView pages, AnyView block_table, AnyView lengths,
                         AnyView k_scale, AnyView k_min, AnyView v_scale, AnyView v_min, AnyView k_offset,
                         AnyView k_channel_scale, bool clamped) {
  return guarded([&] {
    auto object = ffi::make_object<CacheObj>();
    object->cache = to_cache(spec->spec, pages, block_table, lengths, k_scale, k_min, v_scale, v_min,
                             k_offset, k_channel_scale, clamped);
    for (const AnyView tensor :
         {pages, block_table, lengths, k_scale, k_min, v_scale, v_min, k_offset, k_channel_scale}) {
      hold(tensor, object->held);
    }
    return Ref<CacheObj>(std::move(object));
  });
}

AppendArgs to_append_args(const KvCacheSpec& spec, AnyView k, AnyView v, AnyView cu_seqlens, AnyView status) {
  AppendArgs args;
  args.k = to_view(k, "k");
  args.v = spec.is_latent() ? to_optional_view(v, "v") : to_view(v, "v");
  args.cu_seqlens = to_optional_view(cu_seqlens, "cu_seqlens");
  args.status = to_optional_view(status, "status");
  return args;
}

void append_tokens(const Ref<CacheObj>& cache, AnyView k, AnyView v, AnyView slot_mapping, AnyView cu_seqlens,
                   bool advance, int pairing, AnyView cos, AnyView sin, AnyView positions, AnyView status,
                   AnyView stream) {
  guarded([&] {
    AppendArgs args = to_append_args(cache->cache.spec, k, v, cu_seqlens, status);
    args.slot_mapping = to_optional_view(slot_mapping, "slot_mapping");
    args.advance = advance;
    args.rope.pairing = static_cast<RopePairing>(pairing);
    args.rope.cos = to_optional_view(cos, "cos");
    args.rope.sin = to_optional_view(sin, "sin");
    args.rope.positions = to_optional_view(positions, "positions");
    append(cache->cache, args, to_stream(cache->cache.pages.device, stream));
  });
}

/// The same for torch's operators, which know tensors only: nothing of the cache is held.
void append_tensors(const Ref<SpecObj>& spec, AnyView k, AnyView v, AnyView cu_seqlens, AnyView pages,
                    AnyView block_table, AnyView lengths, AnyView status, AnyView k_scale, AnyView k_min,
                    AnyView v_scale, AnyView v_min, AnyView k_offset, AnyView k_channel_scale, bool advance) {
  guarded([&] {
    AppendArgs args = to_append_args(spec->spec, k, v, cu_seqlens, status);
    args.advance = advance;
    const PagedKv cache = to_cache(spec->spec, pages, block_table, lengths, k_scale, k_min, v_scale, v_min,
                                   k_offset, k_channel_scale, false);
    append(cache, args, to_stream(cache.pages.device, AnyView(nullptr)));
  });
}

void dequantize_cache(const Ref<CacheObj>& cache, AnyView k_out, AnyView v_out, AnyView stream) {
  guarded([&] {
    dequantize(cache->cache, to_optional_view(k_out, "k_out"), to_optional_view(v_out, "v_out"),
               to_stream(cache->cache.pages.device, stream));
  });
}

/// All scales, then all mins.
Array<double> calibrate_scales(AnyView x, const String& format, bool rotate, AnyView k_offset,
                               AnyView k_channel_scale) {
  return guarded([&] {
    const StaticScaleValues values = calibrate(
        to_view(x, "x"), parse_format(text_of(format)), rotate,
        {to_optional_view(k_offset, "k_offset"), to_optional_view(k_channel_scale, "k_channel_scale")});
    Array<double> all;
    for (const float s : values.scale) all.push_back(s);
    for (const float m : values.min) all.push_back(m);
    return all;
  });
}

Array<Array<double>> to_arrays(const ChannelValues& values) {
  Array<Array<double>> both;
  for (const std::vector<float>* x : {&values.offset, &values.scale}) {
    Array<double> all;
    for (const float value : *x) all.push_back(value);
    both.push_back(all);
  }
  return both;
}

/// Offsets and scales; empty where it is best without.
Array<Array<double>> choose_channels(AnyView k, const String& format, bool rotate, AnyView q) {
  return guarded([&] {
    return to_arrays(
        calibrate_channels(to_view(k, "k"), parse_format(text_of(format)), rotate, to_optional_view(q, "q")));
  });
}

Array<Array<double>> values_of_channels(AnyView k, bool offset, bool scale) {
  return guarded([&] { return to_arrays(channel_values(to_view(k, "k"), offset, scale)); });
}

void exchange_fbgemm(const Ref<CacheObj>& cache, bool value_part, bool import, AnyView rows, AnyView slots) {
  guarded([&] {
    const KvPart part = value_part ? KvPart::kV : KvPart::kK;
    const TensorView row_view = to_view(rows, "rows");
    const TensorView slot_view = to_view(slots, "slots");
    if (import) {
      import_fbgemm_int4(cache->cache, part, row_view, slot_view);
    } else {
      export_fbgemm_int4(cache->cache, part, slot_view, row_view);
    }
  });
}

/// Owns the memory of a tensor that Python asked for, and that of a tensor seen under another element type.
struct CpuMemory {
  static constexpr std::size_t kAlignment = 256;
  void AllocData(DLTensor* tensor) {
    tensor->data =
        ::operator new (std::max<std::size_t>(ffi::GetDataSize(*tensor), 1), std::align_val_t{kAlignment});
  }
  void FreeData(DLTensor* tensor) { ::operator delete (tensor->data, std::align_val_t{kAlignment}); }
};

struct SharedMemory {
  ffi::Tensor owner;
  void AllocData(DLTensor* tensor) { tensor->data = owner.data_ptr(); }
  void FreeData(DLTensor*) {}
};

constexpr DLDataType kBf16{kDLBfloat, 16, 1};

/// A new CPU tensor for frameworks that cannot allocate one to be written (JAX).
ffi::Tensor empty(const ffi::Shape& shape, DLDataType dtype) {
  return ffi::Tensor::FromNDAlloc(CpuMemory{}, shape, dtype, DLDevice{kDLCPU, 0});
}

/// The bf16 values in a contiguous uint16 tensor: NumPy's DLPack knows no bf16.
ffi::Tensor as_bf16(const ffi::Tensor& bits) {
  return ffi::Tensor::FromNDAlloc(SharedMemory{bits}, bits.shape(), kBf16, bits.device());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_cuda, has_cuda);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(format_info, format_info);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(formats, formats);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(spec, make_spec);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layout, layout);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(spans, spans);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cache, make_cache);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append, append_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_tensors, append_tensors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize, dequantize_cache);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(calibrate, calibrate_scales);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(calibrate_channels, choose_channels);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(channel_values, values_of_channels);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(exchange_fbgemm, exchange_fbgemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(empty, empty);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(as_bf16, as_bf16);

}  // namespace halftone::python
