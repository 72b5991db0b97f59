#include "cli/eval/measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "cli/files/owned_cache.h"
#include "cli/terminal/text.h"
#include "halftone/attention.h"

namespace halftone::cli {
namespace {

using reference::Tensor;

double elapsed_us(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

/// Tokens and queries that options leave of a layer.
CapturedLayer restrict_layer(CapturedLayer layer, const EvalOptions& options, std::int64_t& first_query) {
  const std::int64_t tokens = options.tokens == 0 ? layer.tokens : std::min(options.tokens, layer.tokens);
  std::int64_t queries = layer.queries - (layer.tokens - tokens);  // query i stands at i + tokens - queries
  if (queries < 1) {
    throw UsageError(
        fmt::format("--tokens is {}, but '{}' has queries only for its last {} of {} tokens: use more.",
                    options.tokens, printable(layer.name()), layer.queries, layer.tokens));
  }
  first_query = std::max<std::int64_t>(0, queries - options.max_queries);
  layer.tokens = tokens;
  layer.queries = queries - first_query;
  return layer;
}

/// The first `count` dims of each token of k [tokens, 1, dim].
Tensor first_dims(const Tensor& k, int count) {
  const std::int64_t tokens = k.shape()[0], dim = k.shape()[2];
  const std::vector<float> all = k.to_floats();
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(tokens * count));
  for (std::int64_t t = 0; t < tokens; ++t)
    values.insert(values.end(), all.begin() + t * dim, all.begin() + t * dim + count);
  return Tensor::of(k.dtype(), {tokens, 1, count}, values);
}

/// Attention of the last `queries` queries over the cache, timed.
struct AttentionRun {
  Tensor out, lse;
  double us = 0;
};

AttentionRun run_attention(const LoadedLayer& layer, const EvalOptions& options, const OwnedCache& cache,
                           std::int64_t queries, int max_repeats) {
  const CapturedLayer& shape = layer.shape;
  AttentionProblem problem;
  problem.batch = 1;
  problem.q_heads = shape.q_heads;
  problem.kv = cache.spec;
  problem.max_q_len = static_cast<int>(queries);
  problem.max_kv_len = static_cast<int>(shape.tokens);
  problem.q_dtype = layer.q.dtype();
  problem.out_dtype = DType::kFloat32;
  problem.mask.causal = true;
  problem.mask.window_left = options.window;
  problem.scale = static_cast<float>(options.scale);
  problem.softcap = static_cast<float>(options.softcap);
  problem.lse = true;
  problem.arithmetic = options.arithmetic;
  const Plan plan = halftone::plan(problem);

  AttentionRun result;
  result.out = Tensor(DType::kFloat32, {queries, shape.q_heads, shape.v_dim});
  result.lse = Tensor(DType::kFloat32, {queries, shape.q_heads});
  const Tensor workspace(DType::kUInt8,
                         {std::max<std::int64_t>(1, static_cast<std::int64_t>(plan.workspace_bytes()))});
  AttentionArgs args;
  args.q = token_range(layer.q.view(), shape.queries - queries, queries);
  args.kv = cache.view();
  args.lengths.kv_lengths = cache.lengths.view();
  args.out = result.out.view();
  args.lse = result.lse.view();
  schedule(plan, args.lengths, workspace.view());

  // The best of a few calls: the others met other load on the machine.
  result.us = std::numeric_limits<double>::infinity();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < max_repeats && (i == 0 || elapsed_us(start) < 200e3); ++i) {
    const auto begin = std::chrono::steady_clock::now();
    halftone::run(plan, args, workspace.view());
    result.us = std::min(result.us, elapsed_us(begin));
  }
  return result;
}

}  // namespace

std::vector<CapturedLayer> select_layers(const SafetensorsReader& file, const EvalOptions& options,
                                         CapturedParts parts) {
  std::vector<CapturedLayer> all = find_layers(file, options.order, parts);
  if (options.layers.empty()) return all;
  std::vector<CapturedLayer> chosen;
  for (const int i : options.layers) {
    if (i < 0 || i >= static_cast<int>(all.size())) {
      throw UsageError(fmt::format("--layers names layer {}, but the file has {}: use 0 to {}.", i,
                                   all.size(), all.size() - 1));
    }
    chosen.push_back(all[static_cast<std::size_t>(i)]);
  }
  return chosen;
}

EvalOptions options_for(const SafetensorsReader& file, const CapturedLayer& layer, EvalOptions options) {
  const LayerAttention own = attention_of(file, layer);
  if (options.scale == 0) options.scale = own.scale;
  if (options.softcap == 0) options.softcap = own.softcap;
  if (options.window < 0) options.window = own.window;
  return options;
}

LoadedLayer load_layer(const SafetensorsReader& file, const CapturedLayer& captured,
                       const EvalOptions& options) {
  LoadedLayer layer;
  std::int64_t first_query = 0;
  layer.shape = restrict_layer(captured, options, first_query);
  layer.q = load_tensor(file, *captured.q, options.order, first_query, layer.shape.queries);
  if (captured.v == nullptr) {
    layer.k = load_tensor(file, *captured.k, options.order, 0, layer.shape.tokens);
  } else {
    KeysAndValues kv = load_keys_and_values(file, captured, options.order, layer.shape.tokens);
    layer.k = std::move(kv.k);
    layer.v = std::move(kv.v);
  }
  return complete_layer(std::move(layer), options);
}

LoadedLayer complete_layer(LoadedLayer layer, const EvalOptions& options) {
  const CapturedLayer& shape = layer.shape;
  const auto name = [](const TensorInfo* tensor, const char* part) {
    return tensor == nullptr ? std::string(part) : tensor->name;
  };
  if (!layer.v.present()) layer.v = first_dims(layer.k, shape.v_dim);
  const std::vector<float> q_values = to_finite_floats(layer.q, name(shape.q, "q"));
  layer.k_values = to_finite_floats(layer.k, name(shape.k, "k"));
  layer.v_values = to_finite_floats(layer.v, name(shape.v, "v"));
  reference::OracleParams params;
  params.q_len = shape.queries;
  params.kv_len = shape.tokens;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.head_dim = shape.head_dim;
  params.v_head_dim = shape.v_dim;
  params.causal = true;
  params.window_left = options.window;
  params.scale = static_cast<double>(static_cast<float>(options.scale));
  params.softcap = static_cast<double>(static_cast<float>(options.softcap));
  layer.truth =
      reference::attention_oracle(params, q_values.data(), layer.k_values.data(), layer.v_values.data());
  return layer;
}

double bf16_rounding(const LoadedLayer& layer) {
  std::vector<float> rounded;
  rounded.reserve(layer.truth.out.size());
  for (const double x : layer.truth.out) {
    rounded.push_back(reference::round_to(DType::kBFloat16, static_cast<float>(x)));
  }
  return compare_output(layer.truth.out, rounded, layer.shape.q_heads, layer.shape.v_dim).relative;
}

Measured measure(const LoadedLayer& layer, const EvalOptions& options, KvCacheSpec spec,
                 const StaticScales& scales) {
  const CapturedLayer& shape = layer.shape;
  spec.offset_k = spec.offset_k && options.softcap == 0;  // which takes logits as they are
  OwnedCache cache(spec, 1, shape.tokens);
  if (!scales.empty()) {
    cache.set_scales(scales);
  } else {
    cache.calibrate(layer.k.view(), layer.v.view(), layer.q.view(), OwnedCache::ChannelUse::kChoose);
  }
  cache.append(0, layer.k.view(), spec.is_latent() ? TensorView{} : layer.v.view());

  LayerResult result;
  result.scales = cache.scales();
  result.bytes_per_token = bytes_per_token(cache.spec);
  const int stored_dims = shape.head_dim + (spec.is_latent() ? 0 : shape.v_dim);
  result.compression = 2.0 * shape.kv_heads * stored_dims / result.bytes_per_token;
  const Tensor k(DType::kFloat32, {shape.tokens, shape.kv_heads, shape.head_dim});
  const Tensor v(DType::kFloat32, {shape.tokens, shape.kv_heads, shape.v_dim});
  dequantize(cache.view(), k.view(), v.view());
  result.k_snr = snr_db(layer.k_values, k.as<float>());
  result.v_snr = snr_db(layer.v_values, v.as<float>());

  AttentionRun prefill = run_attention(layer, options, cache, shape.queries, options.timed ? 3 : 1);
  result.output = compare_output(layer.truth.out, prefill.out.as<float>(), shape.q_heads, shape.v_dim);
  result.lse_error = largest_difference(layer.truth.lse, prefill.lse.as<float>());
  result.prefill_us = prefill.us;
  if (options.timed) result.decode_us = run_attention(layer, options, cache, 1, 12).us;
  return {std::move(result), std::move(prefill.out)};
}

}  // namespace halftone::cli
