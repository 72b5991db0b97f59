// Offset and scale of K's channels from sample values.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cpu/element.h"
#include "cpu/interrupt.h"
#include "format/channels.h"
#include "format/codec.h"
#include "format/head_dim.h"
#include "halftone/cache.h"
#include "halftone/error.h"
#include "halftone/memory.h"
#include "plan/check_tensor.h"
#include "plan/fail.h"

namespace halftone {
namespace {

using planning::invalid;

/// Rows of K or Q in fp32.
struct Sample {
  std::vector<float> values{};  ///< [tokens, heads, dim]
  std::int64_t tokens = 0;
  int heads = 0;
  int dim = 0;

  std::int64_t channels() const { return std::int64_t{heads} * dim; }
  TensorView view() const {
    return TensorView::contiguous(values.data(), DType::kFloat32, {tokens, heads, dim});
  }
};

Sample sample_of(const TensorView& x, std::string_view name) {
  planning::check_tensor(x, {name,
                             {DType::kFloat32, DType::kFloat16, DType::kBFloat16},
                             {planning::kAnySize, planning::kAnySize, planning::kAnySize},
                             Device{},
                             planning::Strides::kLastContiguous});
  check_head_dim(x.shape[2], fmt::format("{}.shape[2]", name));
  if (x.shape[0] == 0 || x.shape[1] == 0) {
    invalid("{} has shape {}, but a channel needs at least one value: pass sample tokens.", name,
            planning::shape_text(x));
  }
  Sample s{.tokens = x.shape[0], .heads = static_cast<int>(x.shape[1]), .dim = static_cast<int>(x.shape[2])};
  s.values.resize(static_cast<std::size_t>(x.numel()));
  cpu::Interruption interruption;
  float* row = s.values.data();
  for (std::int64_t t = 0; t < s.tokens && !interruption.poll(t); ++t) {
    for (std::int64_t head = 0; head < s.heads; ++head, row += s.dim) {
      cpu::load_row(x.dtype, cpu::row_at(x, t, head), s.dim, row);
      for (int d = 0; d < s.dim; ++d) {
        if (codec::ht_abs(row[d]) <= codec::kMaxInput) continue;
        invalid("{}[{}, {}, {}] is {}, but must be finite and at most 2^100 in magnitude: clean it.", name, t,
                head, d, row[d]);
      }
    }
  }
  interruption.check();
  return s;
}

ChannelValues values_of(const Sample& k, bool offset, bool scale) {
  const auto channels = static_cast<std::size_t>(k.channels());
  std::vector<double> sum(channels);
  const float* token = k.values.data();
  for (std::int64_t t = 0; t < k.tokens; ++t, token += channels) {
    for (std::size_t c = 0; c < channels; ++c) sum[c] += token[c];
  }
  ChannelValues result;
  std::vector<float> center(channels);
  for (std::size_t c = 0; offset && c < channels; ++c) {
    center[c] = static_cast<float>(sum[c] / static_cast<double>(k.tokens));
  }
  if (offset) result.offset = center;
  if (!scale) return result;
  std::vector<float> largest(channels);
  token = k.values.data();
  for (std::int64_t t = 0; t < k.tokens; ++t, token += channels) {
    for (std::size_t c = 0; c < channels; ++c) {
      largest[c] = std::max(largest[c], std::abs(token[c] - center[c]));
    }
  }
  for (const float most : largest) {
    result.scale.push_back(most == 0 ? 1
                                     : std::clamp(std::sqrt(most), Channels::kMinScale, Channels::kMaxScale));
  }
  return result;
}

ChannelTensors tensors_of(const ChannelValues& values, int heads, int dim) {
  const auto tensor = [&](const std::vector<float>& x) {
    return x.empty() ? TensorView{} : TensorView::contiguous(x.data(), DType::kFloat32, {heads, dim});
  };
  return {tensor(values.offset), tensor(values.scale)};
}

/// The sample as a cache of the format gives it back.
std::vector<float> stored(const Sample& k, const KvFormat& format, bool rotate, const ChannelValues& values) {
  const KvCacheSpec spec{.k_format = format,
                         .kv_heads = k.heads,
                         .head_dim = k.dim,
                         .v_head_dim = kHeadDims.front(),
                         .rotate_k = rotate,
                         .offset_k = !values.offset.empty(),
                         .scale_k = !values.scale.empty()};
  const std::int64_t count = (k.tokens + spec.page_size - 1) / spec.page_size;
  const std::int64_t page_bytes = page_layout(spec).page_bytes;
  const AlignedBuffer pages(count * page_bytes);
  std::vector<std::int32_t> table(static_cast<std::size_t>(count)),
      length = {static_cast<std::int32_t>(k.tokens)};
  std::iota(table.begin(), table.end(), 0);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(k.tokens));
  std::iota(slots.begin(), slots.end(), 0);
  PagedKv cache{.spec = spec,
                .pages = pages.view({count, page_bytes}),
                .block_table = TensorView::contiguous(table.data(), DType::kInt32, {1, count}),
                .lengths = TensorView::contiguous(length.data(), DType::kInt32, {1}),
                .k_channels = tensors_of(values, k.heads, k.dim)};
  StaticScaleValues fixed;
  if (format.static_scale()) {
    fixed = calibrate(k.view(), format, rotate, cache.k_channels);
    const auto size = static_cast<std::int64_t>(fixed.scale.size());
    cache.k_scale.scale = TensorView::contiguous(fixed.scale.data(), DType::kFloat32, {size});
    if (format.asymmetric)
      cache.k_scale.min = TensorView::contiguous(fixed.min.data(), DType::kFloat32, {size});
  }
  const std::vector<float> none(static_cast<std::size_t>(k.tokens * k.heads * spec.v_dim()));
  append(cache, {.k = k.view(),
                 .v = TensorView::contiguous(none.data(), DType::kFloat32, {k.tokens, k.heads, spec.v_dim()}),
                 .slot_mapping = TensorView::contiguous(slots.data(), DType::kInt64, {k.tokens})});
  std::vector<float> out(k.values.size());
  dequantize(cache, TensorView::contiguous(out.data(), DType::kFloat32, {k.tokens, k.heads, k.dim}), {});
  return out;
}

/// Sum over tokens and channels of the squared error of K, less its mean, which softmax cancels.
double error_of(const Sample& k, const std::vector<float>& read, const std::vector<double>& weights) {
  const auto channels = static_cast<std::size_t>(k.channels());
  std::vector<double> sum(channels), squares(channels);
  for (std::size_t i = 0; i < read.size(); ++i) {
    const double e = static_cast<double>(read[i]) - static_cast<double>(k.values[i]);
    sum[i % channels] += e;
    squares[i % channels] += e * e;
  }
  double total = 0;
  for (std::size_t c = 0; c < channels; ++c) {
    total += weights[c] * (squares[c] - sum[c] * sum[c] / static_cast<double>(k.tokens));
  }
  return total;
}

/// What a channel's error weighs in the logits: the mean square of what meets it.
std::vector<double> weights_of(const Sample& k, const TensorView& q) {
  std::vector<double> weights(static_cast<std::size_t>(k.channels()), 1.0);
  if (!planning::given(q)) return weights;
  const Sample queries = sample_of(q, "q");
  if (queries.dim != k.dim || queries.heads % k.heads != 0) {
    invalid("q has shape {}, but k has {} heads of {} dims: pass queries of a multiple of as many heads.",
            planning::shape_text(q), k.heads, k.dim);
  }
  std::fill(weights.begin(), weights.end(), 0.0);
  const int group = queries.heads / k.heads;
  for (std::size_t i = 0; i < queries.values.size(); ++i) {
    const std::size_t d = i % static_cast<std::size_t>(k.dim);
    const std::size_t head = i / static_cast<std::size_t>(k.dim) % static_cast<std::size_t>(queries.heads);
    const double x = queries.values[i];
    weights[head / static_cast<std::size_t>(group) * static_cast<std::size_t>(k.dim) + d] += x * x;
  }
  return weights;
}

}  // namespace

ChannelValues channel_values(const TensorView& k, bool offset, bool scale) {
  return values_of(sample_of(k, "k"), offset, scale);
}

ChannelValues calibrate_channels(const TensorView& k, const KvFormat& format, bool rotate,
                                 const TensorView& q) {
  const Sample sample = sample_of(k, "k");
  check_format(format, sample.dim, "format");
  if (!format.quantised()) {
    invalid(
        "format is {}, but offset and scale of channels are for formats that quantise: use one of 8 or 4 "
        "bits.",
        format_name(format));
  }
  const std::vector<double> weights = weights_of(sample, q);
  ChannelValues best;
  double least = error_of(sample, stored(sample, format, rotate, best), weights);
  for (const auto& [offset, scale] : {std::pair{true, false}, {false, true}, {true, true}}) {
    ChannelValues values = values_of(sample, offset, scale);
    const double error = error_of(sample, stored(sample, format, rotate, values), weights);
    if (error >= least) continue;
    least = error;
    best = std::move(values);
  }
  return best;
}

}  // namespace halftone
