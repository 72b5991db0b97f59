#include "cli/cuda/tensors.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "cli/files/owned_cache.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli::cuda {
namespace {

using reference::Tensor;

constexpr std::int64_t kPatternTokens = 256;                    // of random K and V, repeated over a cache
constexpr std::int64_t kPatternValues = std::int64_t{1} << 22;  // of random tensors, likewise
constexpr std::int64_t kSpareMemory = std::int64_t{256} << 20;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Tensor random_activations(DType dtype, std::int64_t tokens, int heads, int dim, std::uint64_t seed) {
  reference::Random random(seed);
  std::vector<float> values(static_cast<std::size_t>(tokens * heads * dim));
  reference::fill(random, reference::Data::kOutlierChannels, values, heads, dim);
  return Tensor::of(dtype, {tokens, heads, dim}, values);
}

/// Pages of random tokens and the static scales that go with them.
OwnedCache page_pattern(const KvCacheSpec& spec) {
  const std::int64_t tokens = std::max<std::int64_t>(kPatternTokens, spec.page_size);
  OwnedCache cache(spec, 1, tokens);
  const Tensor k = random_activations(DType::kBFloat16, tokens, spec.kv_heads, spec.head_dim, 1);
  const Tensor v = random_activations(DType::kBFloat16, tokens, spec.kv_heads, spec.v_dim(), 2);
  cache.calibrate(k.view(), v.view());
  cache.append(0, k.view(), spec.is_latent() ? TensorView() : v.view());
  return cache;
}

}  // namespace

DeviceBuffer device_activations(DType dtype, std::int64_t tokens, int heads, int dim, std::uint64_t seed) {
  const std::int64_t pattern_tokens = std::clamp<std::int64_t>(kPatternValues / (heads * dim), 1, tokens);
  const Tensor pattern = random_activations(dtype, pattern_tokens, heads, dim, seed);
  DeviceBuffer buffer(tokens * heads * dim * 2);
  fill_with(buffer.data(), buffer.bytes(), pattern.bytes());
  return buffer;
}

DeviceCache make_cache(const KvCacheSpec& spec, const std::vector<std::int64_t>& tokens, int layers,
                       std::int64_t spare, Device device) {
  DeviceCache cache;
  cache.layout = page_layout(spec);
  std::int64_t widest = 1;
  for (const std::int64_t n : tokens) {
    cache.num_pages += ceil_div(n, spec.page_size);
    widest = std::max(widest, ceil_div(n, spec.page_size));
  }
  const auto requests = static_cast<std::int64_t>(tokens.size());
  const std::int64_t bytes = layers * cache.num_pages * cache.layout.page_bytes + spare;
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (bytes + kSpareMemory > static_cast<std::int64_t>(free)) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("the cache needs {}, but {} are free on the device: use less --batch, --context "
                            "or --chain.",
                            human_bytes(static_cast<double>(bytes)), human_bytes(static_cast<double>(free))));
  }
  const std::vector<std::int32_t> order = permutation<std::int32_t>(cache.num_pages);
  Tensor table(DType::kInt32, {requests, widest}), lengths(DType::kInt32, {requests});
  table.fill_bytes(0);
  std::size_t next = 0;
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    lengths.as<std::int32_t>()[r] = static_cast<std::int32_t>(tokens[r]);
    const std::int64_t count = ceil_div(tokens[r], spec.page_size);
    std::copy_n(order.begin() + static_cast<std::ptrdiff_t>(next), count,
                table.as<std::int32_t>().begin() + static_cast<std::ptrdiff_t>(r) * widest);
    std::vector<std::int32_t>& slots = cache.slots.emplace_back();
    for (std::int64_t t = 0; t < tokens[r]; ++t) {
      const std::int32_t page = order[next + static_cast<std::size_t>(t / spec.page_size)];
      slots.push_back(page * spec.page_size + static_cast<std::int32_t>(t % spec.page_size));
    }
    next += static_cast<std::size_t>(count);
  }
  const OwnedCache pattern = page_pattern(spec);
  cache.pages = DeviceBuffer(bytes);
  fill_with(cache.pages.data(), bytes, pattern.pages.bytes());
  cache.table = DeviceTensor(table, device);
  cache.lengths = DeviceTensor(lengths, device);
  cache.k_scale = DeviceTensor(pattern.k_scale, device);
  cache.k_min = DeviceTensor(pattern.k_min, device);
  cache.v_scale = DeviceTensor(pattern.v_scale, device);
  cache.v_min = DeviceTensor(pattern.v_min, device);
  cache.k_offset = DeviceTensor(pattern.k_offset, device);
  cache.k_channel_scale = DeviceTensor(pattern.k_channel_scale, device);
  cache.first.spec = spec;
  cache.first.pages = TensorView::contiguous(cache.pages.data(), DType::kUInt8,
                                             {cache.num_pages, cache.layout.page_bytes}, device);
  cache.first.block_table = cache.table.view;
  cache.first.lengths = cache.lengths.view;
  cache.first.k_scale = {cache.k_scale.view, cache.k_min.view};
  cache.first.v_scale = {cache.v_scale.view, cache.v_min.view};
  cache.first.k_channels = {cache.k_offset.view, cache.k_channel_scale.view};
  return cache;
}

DeviceTensor device_sums(const std::vector<std::int64_t>& tokens, Device device) {
  Tensor cu(DType::kInt32, {static_cast<std::int64_t>(tokens.size()) + 1});
  const std::span<std::int32_t> sums = cu.as<std::int32_t>();  // of as many tokens as fit into memory
  sums[0] = 0;
  for (std::size_t r = 0; r < tokens.size(); ++r)
    sums[r + 1] = sums[r] + static_cast<std::int32_t>(tokens[r]);
  return {cu, device};
}

DeviceTensors make_tensors(const KvTensors& shape, const std::vector<std::int64_t>& tokens, int layers,
                           Device device) {
  DeviceTensors made;
  const std::int64_t total = std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0});
  made.k = device_activations(shape.dtype, layers * total, shape.kv_heads, shape.head_dim, 1);
  made.v = device_activations(shape.dtype, layers * total, shape.kv_heads, shape.v_dim(), 2);
  made.cu_kv = device_sums(tokens, device);
  made.first.k =
      TensorView::contiguous(made.k.data(), shape.dtype, {total, shape.kv_heads, shape.head_dim}, device);
  made.first.v =
      TensorView::contiguous(made.v.data(), shape.dtype, {total, shape.kv_heads, shape.v_dim()}, device);
  return made;
}

}  // namespace halftone::cli::cuda
