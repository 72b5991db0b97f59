#include "cli/files/owned_cache.h"

#include <numeric>

namespace halftone::cli {
namespace {

reference::Tensor floats(const std::vector<float>& values) {
  if (values.empty()) return {};
  return reference::Tensor::of(DType::kFloat32, {static_cast<std::int64_t>(values.size())}, values);
}

}  // namespace

OwnedCache::OwnedCache(const KvCacheSpec& cache_spec, int batch, std::int64_t tokens) : spec(cache_spec) {
  const PageLayout layout = page_layout(spec);
  const std::int64_t per_request = (tokens + spec.page_size - 1) / spec.page_size;
  pages = reference::Tensor(DType::kUInt8, {batch * per_request, layout.page_bytes});
  pages.fill_bytes(0);
  block_table = reference::Tensor(DType::kInt32, {batch, per_request});
  const std::span<std::int32_t> entries = block_table.as<std::int32_t>();
  std::iota(entries.begin(), entries.end(), 0);
  lengths = reference::Tensor(DType::kInt32, {batch});
  lengths.fill_bytes(0);
}

void OwnedCache::calibrate(const TensorView& k, const TensorView& v, const TensorView& q, ChannelUse use) {
  if (spec.has_channels()) {
    ChannelValues values = spec.offset_k && spec.scale_k
                               ? calibrate_channels(k, spec.k_format, spec.rotate_k, q)
                               : channel_values(k, spec.offset_k, spec.scale_k);
    const auto channels = static_cast<std::size_t>(spec.kv_heads * spec.head_dim);
    if (use == ChannelUse::kBoth && spec.offset_k) values.offset.resize(channels, 0.0F);
    if (use == ChannelUse::kBoth && spec.scale_k) values.scale.resize(channels, 1.0F);
    set_channels(values.offset, values.scale);
  }
  for (const KvSpan& span : spec.spans()) {
    if (!span.format.static_scale()) continue;
    const bool of_k = span.k_first >= 0;
    const StaticScaleValues values = halftone::calibrate(of_k ? k : v, span.format, span.rotate,
                                                         of_k ? view().k_channels : ChannelTensors{});
    (of_k ? k_scale : v_scale) = floats(values.scale);
    (of_k ? k_min : v_min) = floats(values.min);
  }
}

void OwnedCache::set_channels(const std::vector<float>& offset, const std::vector<float>& scale) {
  const auto tensor = [&](const std::vector<float>& values) {
    if (values.empty()) return reference::Tensor{};
    return reference::Tensor::of(DType::kFloat32, {spec.kv_heads, spec.head_dim}, values);
  };
  k_offset = tensor(offset);
  k_channel_scale = tensor(scale);
  spec.offset_k = k_offset.present();
  spec.scale_k = k_channel_scale.present();
}

void OwnedCache::set_scales(const StaticScales& scales) {
  k_scale = floats(scales.k_scale);
  k_min = floats(scales.k_min);
  v_scale = floats(scales.v_scale);
  v_min = floats(scales.v_min);
  set_channels(scales.k_offset, scales.k_channel_scale);
}

StaticScales OwnedCache::scales() const {
  const auto values = [](const reference::Tensor& tensor) {
    return tensor.present() ? tensor.to_floats() : std::vector<float>();
  };
  return {values(k_scale), values(k_min),    values(v_scale),
          values(v_min),   values(k_offset), values(k_channel_scale)};
}

void OwnedCache::append(int request, const TensorView& k, const TensorView& v) {
  const std::int64_t per_request = block_table.shape()[1];
  std::int32_t& length = lengths.as<std::int32_t>()[static_cast<std::size_t>(request)];
  std::vector<std::int64_t> slots(static_cast<std::size_t>(k.shape[0]));
  std::iota(slots.begin(), slots.end(), request * per_request * spec.page_size + length);
  AppendArgs args;
  args.k = k;
  args.v = v;
  args.slot_mapping = TensorView::contiguous(slots.data(), DType::kInt64, {k.shape[0]});
  halftone::append(view(), args);
  length += static_cast<std::int32_t>(k.shape[0]);
}

PagedKv OwnedCache::view() const {
  PagedKv cache;
  cache.spec = spec;
  cache.pages = pages.view();
  cache.block_table = block_table.view();
  cache.lengths = lengths.view();
  cache.k_scale = {k_scale.view(), k_min.view()};
  cache.v_scale = {v_scale.view(), v_min.view()};
  cache.k_channels = {k_offset.view(), k_channel_scale.view()};
  return cache;
}

TensorView token_range(const TensorView& x, std::int64_t first, std::int64_t count) {
  TensorView part = x;
  part.shape[0] = count;
  part.data = static_cast<std::byte*>(x.data) + first * x.strides[0] * dtype_bits(x.dtype) / 8;
  return part;
}

}  // namespace halftone::cli
