// Tensors of the benchmarks in device memory: caches, plain K and V, activations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cli/cuda/device.h"
#include "halftone/attention.h"
#include "reference/random.h"

namespace halftone::cli::cuda {

/// `tokens` of bf16 [tokens, heads, dim], random and repeated.
DeviceBuffer device_activations(DType dtype, std::int64_t tokens, int heads, int dim, std::uint64_t seed);

/// Numbers 0 to n - 1 in random order.
template <class T>
std::vector<T> permutation(std::int64_t n) {
  std::vector<T> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), T{0});
  reference::Random random(3);
  random.shuffle(order);
  return order;
}

/// Pages for requests of given lengths in random order, for `layers` layers that share one block table.
struct DeviceCache {
  PageLayout layout;
  std::int64_t num_pages = 0;  ///< of one layer
  DeviceBuffer pages;          ///< layer after layer, then `spare` bytes
  DeviceTensor table, lengths, k_scale, k_min, v_scale, v_min, k_offset, k_channel_scale;
  std::vector<std::vector<std::int32_t>> slots;  ///< of each request, in the order of its tokens
  PagedKv first;                                 ///< of the first layer

  PagedKv layer(int index) const {
    PagedKv cache = first;
    cache.pages.data = pages.data() + index * num_pages * layout.page_bytes;
    return cache;
  }
};

/// Every page is full of random tokens. Throws ResourceExhausted where the device has no room.
DeviceCache make_cache(const KvCacheSpec& spec, const std::vector<std::int64_t>& tokens, int layers,
                       std::int64_t spare, Device device);

/// K and V of requests of given lengths as tensors, for `layers` layers.
struct DeviceTensors {
  DeviceBuffer k, v;
  DeviceTensor cu_kv;
  KvTensorViews first;  ///< of the first layer

  KvTensorViews layer(int index) const {
    KvTensorViews views = first;
    views.k.data = k.data() + index * first.k.numel() * 2;
    views.v.data = v.data() + index * first.v.numel() * 2;
    return views;
  }
};

/// int32 [n + 1]: sums of the lengths before each request, and of all.
DeviceTensor device_sums(const std::vector<std::int64_t>& tokens, Device device);

DeviceTensors make_tensors(const KvTensors& shape, const std::vector<std::int64_t>& tokens, int layers,
                           Device device);

}  // namespace halftone::cli::cuda
