#include "plan/validate_cache.h"

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "format/channels.h"
#include "format/codec.h"
#include "halftone/error.h"
#include "plan/check_tensor.h"
#include "plan/fail.h"

namespace halftone::planning {
namespace {

using enum DType;

void check_static_values(const TensorView& t, std::string_view name, bool is_scale) {
  if (t.device.type != DeviceType::kCpu) return;
  const auto* values = static_cast<const float*>(t.data);
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    const float x = values[i];
    const bool good = is_scale ? x >= codec::kMinF32Scale && x <= codec::kMaxF32Scale : codec::is_finite(x);
    if (good) continue;
    invalid("{}[{}] is {}, but must be finite{}: use calibrate().", name, i, x,
            is_scale ? " and within [2^-100, 2^119]" : "");
  }
}

/// What sentences call the two tensors of a static scale.
struct ScaleNames {
  std::string_view scale;
  std::string_view min;
};
constexpr ScaleNames kOfK{"cache.k_scale.scale", "cache.k_scale.min"};
constexpr ScaleNames kOfV{"cache.v_scale.scale", "cache.v_scale.min"};

void check_static_scale(const StaticScale& s, const KvFormat& format, int kv_heads, const ScaleNames& names,
                        Device device) {
  const auto [scale, min] = names;
  if (!format.static_scale()) {
    if (!given(s.scale) && !given(s.min)) return;
    const std::string reason = fmt::format("{} computes or needs no static scale", format_name(format));
    check_absent(s.scale, scale, reason);
    check_absent(s.min, min, reason);
    return;
  }
  const std::int64_t count = format.granularity == Granularity::kTensor ? 1 : kv_heads;
  check_tensor(s.scale, {scale, {kFloat32}, {count}, device});
  check_static_values(s.scale, scale, true);
  if (format.asymmetric) {
    check_tensor(s.min, {min, {kFloat32}, {count}, device});
    check_static_values(s.min, min, false);
  } else {
    check_absent(s.min, min, fmt::format("{} is symmetric", format_name(format)));
  }
}

void check_pages(const TensorView& pages, const PageLayout& layout) {
  check_tensor(
      pages,
      {"cache.pages", {kUInt8}, {kAnySize, layout.page_bytes}, pages.device, Strides::kLastContiguous});
  constexpr int kPageAlignment = 16;
  if (pages.shape[0] > 1 &&
      (pages.strides[0] < layout.page_bytes || pages.strides[0] % kPageAlignment != 0)) {
    invalid("cache.pages has stride {} in dimension 0, but must be a multiple of 16 and at least {}: use {}.",
            pages.strides[0], layout.page_bytes, layout.page_bytes);
  }
  if (const auto rest = reinterpret_cast<std::uintptr_t>(pages.data) % kPageAlignment; rest != 0) {
    invalid(
        "cache.pages starts {} bytes past a multiple of 16, but must be 16-byte aligned: use aligned memory.",
        rest);
  }
}

void check_rope(const Rope& rope, std::int64_t tokens, const KvCacheSpec& spec, Device device) {
  if (rope.pairing == RopePairing::kNone) {
    const std::string_view reason = "rope.pairing is kNone";
    check_absent(rope.cos, "rope.cos", reason);
    check_absent(rope.sin, "rope.sin", reason);
    check_absent(rope.positions, "rope.positions", reason);
    return;
  }
  if (rope.pairing != RopePairing::kHalf && rope.pairing != RopePairing::kInterleaved) {
    invalid("rope.pairing is {}, but must be kNone, kHalf or kInterleaved: use kHalf.",
            static_cast<int>(rope.pairing));
  }
  check_tensor(rope.cos, {"rope.cos", {kFloat32}, {kAnySize, kAnySize}, device});
  check_tensor(rope.sin, {"rope.sin", {kFloat32}, {rope.cos.shape[0], rope.cos.shape[1]}, device});
  check_tensor(rope.positions, {"rope.positions", {kInt32}, {tokens}, device});
  const int dims = spec.rotary_dims();
  if (const std::int64_t half = rope.cos.shape[1]; half < 1 || 2 * half > dims) {
    invalid("rope.cos.shape[1] is {}, but rotary_dim = 2 * it must be 2 to {} {}: use {}.", half,
            spec.is_latent() ? "rope_dim" : "head_dim", dims, dims / 2);
  }
}

}  // namespace

void check_channels(const ChannelTensors& channels, const KvCacheSpec& spec, Device device) {
  const struct {
    const TensorView& view;
    bool wanted;
    std::string_view name, field;
    bool (*good)(float);
    std::string_view limit;
  } both[] = {{channels.offset, spec.offset_k, "cache.k_channels.offset", "offset_k", Channels::is_offset,
               "at most 2^100 in magnitude"},
              {channels.scale, spec.scale_k, "cache.k_channels.scale", "scale_k", Channels::is_scale,
               "within [2^-16, 2^16]"}};
  for (const auto& [view, wanted, name, field, good, limit] : both) {
    if (!wanted) {
      check_absent(view, name, fmt::format("spec.{} is false", field));
      continue;
    }
    if (!given(view))
      invalid("{} is absent, but spec.{} is true: pass what calibrate_channels() gives.", name, field);
    check_tensor(view, {name, {kFloat32}, {spec.kv_heads, spec.head_dim}, device});
    if (device.type != DeviceType::kCpu) continue;
    const auto* values = static_cast<const float*>(view.data);
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      if (good(values[i])) continue;
      invalid("{}[{}, {}] is {}, but must be finite and {}: use calibrate_channels().", name,
              i / spec.head_dim, i % spec.head_dim, values[i], limit);
    }
  }
}

PageLayout validate_cache(const PagedKv& cache, CacheIndex index) {
  const PageLayout layout = page_layout(cache.spec);
  check_pages(cache.pages, layout);
  const Device device = cache.pages.device;
  check_static_scale(cache.k_scale, cache.spec.k_format, cache.spec.kv_heads, kOfK, device);
  check_static_scale(cache.v_scale, cache.spec.v_format, cache.spec.kv_heads, kOfV, device);
  check_channels(cache.k_channels, cache.spec, device);
  if (cache.table_mode != BlockTableMode::kTrusted && cache.table_mode != BlockTableMode::kClamped) {
    invalid("cache.table_mode is {}, but must be kTrusted or kClamped: use kTrusted.",
            static_cast<int>(cache.table_mode));
  }
  if (index == CacheIndex::kTableAndLengths) {
    check_tensor(cache.block_table,
                 {"cache.block_table", {kInt32}, {kAnySize, kAnySize}, device, Strides::kLastContiguous});
    check_tensor(cache.lengths, {"cache.lengths", {kInt32}, {cache.block_table.shape[0]}, device});
  }
  return layout;
}

void check_appended(const KvCacheSpec& spec, Device device, const Appended& appended) {
  check_tensor(appended.k, {"k",
                            {kFloat32, kFloat16, kBFloat16},
                            {kAnySize, spec.kv_heads, spec.head_dim},
                            device,
                            Strides::kLastContiguous});
  const std::int64_t tokens = appended.k.shape[0];
  if (spec.is_latent()) {
    check_absent(appended.v, "v", "V of a latent cache is a part of k");
  } else {
    check_tensor(
        appended.v,
        {"v", {appended.k.dtype}, {tokens, spec.kv_heads, spec.v_dim()}, device, Strides::kLastContiguous});
  }
  check_rope(appended.rope, tokens, spec, device);
}

void check_apart(std::span<const NamedTensor> outputs, const PagedKv& cache) {
  const NamedTensor inputs[] = {{cache.k_scale.scale, kOfK.scale},
                                {cache.k_scale.min, kOfK.min},
                                {cache.v_scale.scale, kOfV.scale},
                                {cache.v_scale.min, kOfV.min},
                                {cache.k_channels.offset, "cache.k_channels.offset"},
                                {cache.k_channels.scale, "cache.k_channels.scale"}};
  check_disjoint(outputs, inputs);
}

void validate_append(const PagedKv& cache, const AppendArgs& args) {
  const bool by_slot = given(args.slot_mapping);
  if (by_slot == given(args.cu_seqlens)) {
    invalid("slot_mapping and cu_seqlens are both {}, but exactly one says where tokens go: pass one.",
            by_slot ? "present" : "absent");
  }
  if (by_slot && args.advance) {
    invalid("advance is {}, but slot_mapping does not say whose tokens they are: pass cu_seqlens or {}.",
            true, "advance = false");
  }
  validate_cache(cache, by_slot ? CacheIndex::kUnused : CacheIndex::kTableAndLengths);
  const KvCacheSpec& spec = cache.spec;
  const Device device = cache.pages.device;
  check_appended(spec, device, {args.k, args.v, args.rope});
  const std::int64_t tokens = args.k.shape[0];
  if (by_slot) {
    check_tensor(args.slot_mapping, {"slot_mapping", {kInt64}, {tokens}, device});
  } else {
    check_tensor(args.cu_seqlens, {"cu_seqlens", {kInt32}, {cache.lengths.shape[0] + 1}, device});
  }
  if (given(args.status) || device.type == DeviceType::kCuda) {
    check_tensor(args.status, {"status", {kInt32}, {1}, device});
  }

  const NamedTensor lengths{cache.lengths, "cache.lengths"};
  const TensorView absent;
  const NamedTensor none{absent, ""};
  const NamedTensor outputs[] = {
      {cache.pages, "cache.pages"}, {args.status, "status"}, args.advance ? lengths : none};
  const NamedTensor inputs[] = {{args.k, "k"},
                                {args.v, "v"},
                                {args.slot_mapping, "slot_mapping"},
                                {args.cu_seqlens, "cu_seqlens"},
                                {args.rope.cos, "rope.cos"},
                                {args.rope.sin, "rope.sin"},
                                {args.rope.positions, "rope.positions"},
                                {cache.block_table, "cache.block_table"},
                                args.advance ? none : lengths};
  check_disjoint(outputs, inputs);
  check_apart(outputs, cache);
}

void validate_dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out) {
  validate_cache(cache, CacheIndex::kTableAndLengths);
  if (!given(k_out) && !given(v_out)) {
    invalid("k_out and v_out are both absent, but dequantize needs an output: pass at least one.");
  }
  const KvCacheSpec& spec = cache.spec;
  const struct {
    const TensorView& view;
    std::string_view name;
    int dim;
  } outputs[] = {{k_out, "k_out", spec.head_dim}, {v_out, "v_out", spec.v_dim()}};
  for (const auto& out : outputs) {
    if (!given(out.view)) continue;
    check_tensor(out.view, {out.name,
                            {kFloat32, kFloat16, kBFloat16},
                            {kAnySize, spec.kv_heads, out.dim},
                            cache.pages.device,
                            Strides::kLastContiguous});
    check_no_self_overlap(out.view, out.name);
    check_disjoint(out.view, out.name, cache.pages, "cache.pages");
    check_disjoint(out.view, out.name, cache.block_table, "cache.block_table");
    check_disjoint(out.view, out.name, cache.lengths, "cache.lengths");
    for (const StaticScale* s : {&cache.k_scale, &cache.v_scale}) {
      check_disjoint(out.view, out.name, s->scale, "a static scale");
      check_disjoint(out.view, out.name, s->min, "a static min");
    }
    check_disjoint(out.view, out.name, cache.k_channels.offset, "cache.k_channels.offset");
    check_disjoint(out.view, out.name, cache.k_channels.scale, "cache.k_channels.scale");
  }
  check_disjoint(k_out, "k_out", v_out, "v_out");
}

int validate_fbgemm(const PagedKv& cache, KvPart which, const TensorView& rows, const TensorView& slots) {
  validate_cache(cache, CacheIndex::kUnused);
  if (cache.spec.is_latent()) {
    fail(ErrorCode::kUnsupported,
         "rope_dim is {}, but FBGEMM rows are K or V of a cache that stores them apart: use a spec without "
         "it.",
         cache.spec.rope_dim);
  }
  const bool k = which == KvPart::kK;
  const KvFormat& format = k ? cache.spec.k_format : cache.spec.v_format;
  const std::string_view name = k ? "k_format" : "v_format";
  const int dim = k ? cache.spec.head_dim : cache.spec.v_dim();
  const bool per_head =
      format.granularity == Granularity::kTokenHead || format.granularity == Granularity::kGroup;
  if (format.dtype != kInt4 || !format.asymmetric || !per_head || format.scale_dtype != kFloat16) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format(
            "{} is {}, but FBGEMM rows are asymmetric int4 with f16 scales: use int4-row or int4-g32.", name,
            format_name(format)));
  }
  if (k ? cache.spec.rotate_k : cache.spec.rotate_v) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} is true, but FBGEMM rows are not rotated: use a cache without rotation.",
                            k ? "rotate_k" : "rotate_v"));
  }
  if (k && cache.spec.has_channels()) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} is true, but FBGEMM rows have neither offset nor scale of channels: use a "
                            "cache without them.",
                            cache.spec.offset_k ? "offset_k" : "scale_k"));
  }
  if (cache.pages.device.type != DeviceType::kCpu) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("cache.pages is on {}, but FBGEMM rows are converted on the CPU: copy the pages there.",
                    device_name(cache.pages.device)));
  }
  const int groups = format.params_per_token(dim);
  check_tensor(slots, {"slots", {kInt64}, {kAnySize}, cache.pages.device});
  check_tensor(rows, {"rows",
                      {kUInt8},
                      {slots.shape[0], cache.spec.kv_heads, 4 * groups + dim / 2},
                      cache.pages.device,
                      Strides::kLastContiguous});
  check_no_self_overlap(rows, "rows");
  check_disjoint(cache.pages, "cache.pages", rows, "rows");
  check_disjoint(cache.pages, "cache.pages", slots, "slots");
  check_disjoint(rows, "rows", slots, "slots");
  return groups;
}

}  // namespace halftone::planning
