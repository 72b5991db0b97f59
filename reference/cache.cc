#include "reference/cache.h"

#include <algorithm>
#include <climits>
#include <numeric>

namespace halftone::reference {

Cache::Cache(const KvCacheSpec& cache_spec, std::span<const int> capacities, Random& random,
             const CacheOptions& options)
    : spec(cache_spec), table_mode(options.table_mode) {
  const auto batch = static_cast<std::int64_t>(capacities.size());
  const auto pages_of = [&](int tokens) { return (tokens + spec.page_size - 1) / spec.page_size; };
  int columns = options.spare_columns;
  int used = 0;
  for (const int capacity : capacities) {
    columns = std::max(columns, pages_of(capacity) + options.spare_columns);
    used += pages_of(capacity);
  }
  columns = std::max(columns, 1);
  const int total = std::max(1, used + options.spare_pages);
  pages = Tensor(DType::kUInt8, {total, page_layout(spec).page_bytes});
  block_table = Tensor(DType::kInt32, {batch, columns});
  lengths = Tensor(DType::kInt32, {batch});
  lengths.fill_bytes(0);

  std::vector<int> order(static_cast<std::size_t>(total));
  std::iota(order.begin(), order.end(), 0);
  if (options.shuffle) random.shuffle(order);
  std::size_t next = 0;
  const auto table = block_table.as<std::int32_t>();
  for (std::int64_t r = 0; r < batch; ++r) {
    const int live = pages_of(capacities[static_cast<std::size_t>(r)]);
    for (int c = 0; c < columns; ++c) {
      const std::vector<std::int32_t> garbage = {INT_MAX, INT_MIN, -1, total,
                                                 static_cast<std::int32_t>(random.next())};
      table[static_cast<std::size_t>(r * columns + c)] = c < live ? order[next++] : random.pick(garbage);
    }
  }
}

PagedKv Cache::view() const {
  PagedKv v;
  v.spec = spec;
  v.pages = pages.view();
  v.block_table = block_table.view();
  v.lengths = lengths.view();
  v.k_scale = {k_scale.view(), k_min.view()};
  v.v_scale = {v_scale.view(), v_min.view()};
  v.table_mode = table_mode;
  v.k_channels = {k_offset.view(), k_channel_scale.view()};
  return v;
}

void Cache::calibrate(const Tensor& k, const Tensor& v) {
  if (spec.has_channels()) {
    const auto channels = static_cast<std::size_t>(spec.kv_heads * spec.head_dim);
    ChannelValues values{std::vector<float>(spec.offset_k ? channels : 0),
                         std::vector<float>(spec.scale_k ? channels : 0, 1.0F)};
    if (k.numel() > 0) values = channel_values(k.view(), spec.offset_k, spec.scale_k);
    const auto tensor = [&](const std::vector<float>& x) {
      return Tensor::of(DType::kFloat32, {spec.kv_heads, spec.head_dim}, x);
    };
    if (spec.offset_k) k_offset = tensor(values.offset);
    if (spec.scale_k) k_channel_scale = tensor(values.scale);
  }
  const auto set = [&](const KvFormat& format, bool rotate, const Tensor& x, Tensor& scale, Tensor& min) {
    if (!format.static_scale()) return;
    StaticScaleValues values;
    if (x.numel() > 0) {
      values = halftone::calibrate(x.view(), format, rotate, &x == &k ? view().k_channels : ChannelTensors{});
    } else {
      values.scale.assign(
          format.granularity == Granularity::kTensor ? 1 : static_cast<std::size_t>(x.shape()[1]), 1.0F);
      values.min.assign(values.scale.size(), 0.0F);
    }
    const auto count = static_cast<std::int64_t>(values.scale.size());
    scale = Tensor::of(DType::kFloat32, {count}, values.scale);
    if (format.asymmetric) min = Tensor::of(DType::kFloat32, {count}, values.min);
  };
  set(spec.k_format, spec.rotate_k, k, k_scale, k_min);
  set(spec.v_format, spec.rotate_v, v, v_scale, v_min);
}

void Cache::append(std::span<const int> counts, const Tensor& k, const Tensor& v) {
  std::vector<std::int32_t> cumulative = {0};
  for (const int n : counts) cumulative.push_back(cumulative.back() + n);
  const Tensor cu = Tensor::of({static_cast<std::int64_t>(cumulative.size())}, cumulative);
  AppendArgs args;
  args.k = k.view();
  if (!spec.is_latent()) args.v = v.view();
  args.cu_seqlens = cu.view();
  halftone::append(view(), args);
  for (std::size_t i = 0; i < counts.size(); ++i) lengths.as<std::int32_t>()[i] += counts[i];
}

std::vector<std::int64_t> Cache::slots() const {
  std::vector<std::int64_t> result;
  const std::int64_t columns = block_table.shape()[1];
  const auto table = block_table.as<std::int32_t>();
  for (std::size_t r = 0; r < lengths.as<std::int32_t>().size(); ++r) {
    for (int t = 0; t < lengths.as<std::int32_t>()[r]; ++t) {
      const std::int64_t page =
          table[r * static_cast<std::size_t>(columns) + static_cast<std::size_t>(t / spec.page_size)];
      result.push_back(page * spec.page_size + t % spec.page_size);
    }
  }
  return result;
}

std::int64_t Cache::total_tokens() const {
  std::int64_t total = 0;
  for (const std::int32_t n : lengths.as<std::int32_t>()) total += n;
  return total;
}

Cache Cache::clone() const {
  Cache c;
  c.spec = spec;
  c.table_mode = table_mode;
  c.pages = pages.clone();
  c.block_table = block_table.clone();
  c.lengths = lengths.clone();
  c.k_scale = k_scale.clone();
  c.k_min = k_min.clone();
  c.v_scale = v_scale.clone();
  c.v_min = v_min.clone();
  c.k_offset = k_offset.clone();
  c.k_channel_scale = k_channel_scale.clone();
  return c;
}

bool Cache::guards_intact() const {
  const Tensor* const all[] = {&pages,   &block_table, &lengths,  &k_scale,        &k_min,
                               &v_scale, &v_min,       &k_offset, &k_channel_scale};
  return std::all_of(std::begin(all), std::end(all), [](const Tensor* t) { return t->guards_intact(); });
}

Dequantised dequantised(const Cache& cache) {
  const std::int64_t tokens = cache.total_tokens();
  Dequantised d{Tensor(DType::kFloat32, {tokens, cache.spec.kv_heads, cache.spec.head_dim}),
                Tensor(DType::kFloat32, {tokens, cache.spec.kv_heads, cache.spec.v_dim()})};
  if (tokens > 0) halftone::dequantize(cache.view(), d.k.view(), d.v.view());
  return d;
}

}  // namespace halftone::reference
