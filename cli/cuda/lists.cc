#include "cli/cuda/lists.h"

#include "format/page.h"

namespace halftone::cli::cuda {
namespace {

using reference::Tensor;

DeviceTensor lists_of(int top_k, const std::vector<std::int64_t>& q_lengths, const DeviceCache& cache,
                      std::uint64_t seed, Device device) {
  const std::int64_t queries = std::accumulate(q_lengths.begin(), q_lengths.end(), std::int64_t{0});
  return {Tensor::of({queries, top_k}, random_lists(top_k, q_lengths, cache.slots, seed)), device};
}

GatherList gather_list(const DeviceCache& cache, const DeviceTensor& slots, int layer) {
  return {static_cast<const std::uint8_t*>(cache.layer(layer).pages.data),
          static_cast<const std::int32_t*>(slots.view.data), slots.view.numel()};
}

}  // namespace

void DeviceLists::give(AttentionArgs& args, int layer) const {
  args.indices = first.view;
  if (!second.view.present()) return;
  args.extra_indices = second.view;
  args.extra_kv = extra.layer(layer);
}

DeviceLists make_lists(const ProblemShape& shape, const std::vector<std::int64_t>& q_lengths,
                       const std::vector<std::int64_t>& kv_lengths, int layers, const DeviceCache& cache,
                       Device device) {
  DeviceLists lists;
  lists.first = lists_of(shape.top_k, q_lengths, cache, kFirstLists, device);
  if (shape.extra_top_k == 0) return lists;
  lists.extra = make_cache(cache_spec(shape), kv_lengths, layers, 0, device);
  lists.second = lists_of(shape.extra_top_k, q_lengths, lists.extra, kSecondLists, device);
  return lists;
}

Gather gather_of(const DeviceCache& cache, const DeviceLists& lists, int layer) {
  Gather gather;
  gather.first = gather_list(cache, lists.first, layer);
  if (lists.second.view.present()) gather.second = gather_list(lists.extra, lists.second, layer);
  const KvCacheSpec& spec = cache.first.spec;
  gather.page_bytes = cache.layout.page_bytes;
  gather.page_size = spec.page_size;
  gather.record_bytes = static_cast<int>(cache.layout.row_bytes);
  if (page::params_apart(spec.k_format)) {
    gather.apart_bytes = static_cast<int>(page::apart_bytes(spec.k_format, spec.latent_dim()));
  }
  return gather;
}

}  // namespace halftone::cli::cuda
