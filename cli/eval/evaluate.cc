#include "cli/eval/evaluate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cli/files/owned_cache.h"
#include "cli/terminal/text.h"
#include "format/hadamard.h"
#include "halftone/attention.h"
#include "halftone/error.h"
#include "reference/oracle.h"

namespace halftone::cli {
namespace {

using reference::Tensor;

/// A layer in memory, with the truth about it.
struct LoadedLayer {
  CapturedLayer shape;  ///< tokens and queries after --tokens and --max-queries
  Tensor q, k, v;       ///< [tokens, heads, dim]
  std::vector<float> k_values, v_values;
  reference::OracleResult truth;
};

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

LoadedLayer load_layer(const SafetensorsReader& file, const CapturedLayer& captured,
                       const EvalOptions& options) {
  LoadedLayer layer;
  std::int64_t first_query = 0;
  layer.shape = restrict_layer(captured, options, first_query);
  layer.q = load_tensor(file, *captured.q, options.order, first_query, layer.shape.queries);
  KeysAndValues kv = load_keys_and_values(file, captured, options.order, layer.shape.tokens);
  layer.k = std::move(kv.k);
  layer.v = std::move(kv.v);
  const std::vector<float> q_values = to_finite_floats(layer.q, captured.q->name);
  layer.k_values = to_finite_floats(layer.k, captured.k->name);
  layer.v_values = to_finite_floats(layer.v, captured.v->name);
  reference::OracleParams params;
  params.q_len = layer.shape.queries;
  params.kv_len = layer.shape.tokens;
  params.q_heads = layer.shape.q_heads;
  params.kv_heads = layer.shape.kv_heads;
  params.head_dim = layer.shape.head_dim;
  params.v_head_dim = layer.shape.v_dim;
  params.causal = true;
  params.window_left = options.window;
  params.scale = static_cast<double>(static_cast<float>(options.scale));
  params.softcap = static_cast<double>(static_cast<float>(options.softcap));
  layer.truth =
      reference::attention_oracle(params, q_values.data(), layer.k_values.data(), layer.v_values.data());
  return layer;
}

/// The options for a layer: where they leave attention open, the file says how it is.
EvalOptions options_for(const SafetensorsReader& file, const CapturedLayer& layer, EvalOptions options) {
  const LayerAttention own = attention_of(file, layer);
  if (options.scale == 0) options.scale = own.scale;
  if (options.softcap == 0) options.softcap = own.softcap;
  if (options.window < 0) options.window = own.window;
  return options;
}

LayerReport describe_layer(const LoadedLayer& layer, const EvalOptions& options) {
  LayerReport report;
  report.shape = layer.shape;
  report.attention = {options.scale, options.softcap, options.window};
  report.shape.q = report.shape.k = report.shape.v = nullptr;
  std::vector<float> rounded;
  rounded.reserve(layer.truth.out.size());
  for (const double x : layer.truth.out) {
    rounded.push_back(reference::round_to(DType::kBFloat16, static_cast<float>(x)));
  }
  report.bf16_rounding =
      compare_output(layer.truth.out, rounded, layer.shape.q_heads, layer.shape.v_dim).relative;
  report.k_channels = channel_stats(layer.k_values, layer.shape.kv_heads, layer.shape.head_dim);
  std::vector<float> rotated = layer.k_values;
  const auto dim = static_cast<std::size_t>(layer.shape.head_dim);
  for (std::size_t i = 0; i < rotated.size(); i += dim) hadamard::rotate(&rotated[i], layer.shape.head_dim);
  report.k_channels_rotated = channel_stats(rotated, layer.shape.kv_heads, layer.shape.head_dim);
  return report;
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

LayerResult measure(const LoadedLayer& layer, const EvalOptions& options, const LayerChoice& stored) {
  const CapturedLayer& shape = layer.shape;
  KvCacheSpec spec = stored.choice.spec(shape.kv_heads, shape.head_dim, shape.v_dim, options.page_size);
  spec.offset_k = spec.offset_k && options.softcap == 0;  // which takes logits as they are
  OwnedCache cache(spec, 1, shape.tokens);
  if (!stored.scales.empty()) {
    cache.set_scales(stored.scales);
  } else {
    cache.calibrate(layer.k.view(), layer.v.view(), layer.q.view(), OwnedCache::ChannelUse::kChoose);
  }
  cache.append(0, layer.k.view(), layer.v.view());

  LayerResult result;
  result.scales = cache.scales();
  result.bytes_per_token = bytes_per_token(cache.spec);
  result.compression = 2.0 * shape.kv_heads * (shape.head_dim + shape.v_dim) / result.bytes_per_token;
  const Tensor k(DType::kFloat32, {shape.tokens, shape.kv_heads, shape.head_dim});
  const Tensor v(DType::kFloat32, {shape.tokens, shape.kv_heads, shape.v_dim});
  dequantize(cache.view(), k.view(), v.view());
  result.k_snr = snr_db(layer.k_values, k.as<float>());
  result.v_snr = snr_db(layer.v_values, v.as<float>());

  const AttentionRun prefill = run_attention(layer, options, cache, shape.queries, options.timed ? 3 : 1);
  result.output = compare_output(layer.truth.out, prefill.out.as<float>(), shape.q_heads, shape.v_dim);
  result.lse_error = largest_difference(layer.truth.lse, prefill.lse.as<float>());
  result.prefill_us = prefill.us;
  if (options.timed) result.decode_us = run_attention(layer, options, cache, 1, 12).us;
  return result;
}

void summarise(FormatResult& format) {
  const auto n = static_cast<double>(format.layers.size());
  format.k_snr = format.v_snr = std::numeric_limits<double>::infinity();
  double uncompressed = 0;
  for (const LayerResult& layer : format.layers) {
    format.bytes_per_token += layer.bytes_per_token / n;
    uncompressed += layer.bytes_per_token * layer.compression / n;
    format.k_snr = std::min(format.k_snr, layer.k_snr);
    format.v_snr = std::min(format.v_snr, layer.v_snr);
    format.error_mean += layer.output.relative / n;
    format.error_worst = std::max(format.error_worst, layer.output.relative);
    format.worst_cosine = std::min(format.worst_cosine, layer.output.worst_cosine);
    format.lse_error = std::max(format.lse_error, layer.lse_error);
    format.prefill_us += layer.prefill_us;
    format.decode_us += layer.decode_us;
  }
  format.compression = uncompressed / format.bytes_per_token;
}

/// Errors below this are fp32 arithmetic, not the format: they count as equal.
double significant(double error) { return std::max(error, 1e-5); }

void mark_pareto(std::vector<FormatResult>& formats) {
  for (FormatResult& f : formats) {
    f.pareto = std::isfinite(f.error_worst) &&
               std::none_of(formats.begin(), formats.end(), [&](const FormatResult& other) {
                 const double error = significant(f.error_worst),
                              other_error = significant(other.error_worst);
                 const bool no_worse = other.bytes_per_token <= f.bytes_per_token && other_error <= error;
                 return no_worse && (other.bytes_per_token < f.bytes_per_token || other_error < error);
               });
  }
}

/// The smallest format (then the most exact) whose error is at most the limit, or -1.
template <class Error>
int smallest_within(const std::vector<FormatResult>& formats, double limit, Error&& error) {
  int best = -1;
  for (int i = 0; i < static_cast<int>(formats.size()); ++i) {
    const FormatResult& f = formats[static_cast<std::size_t>(i)];
    if (!(error(f) <= limit)) continue;
    const FormatResult* b = best < 0 ? nullptr : &formats[static_cast<std::size_t>(best)];
    if (b == nullptr || f.bytes_per_token < b->bytes_per_token ||
        (f.bytes_per_token == b->bytes_per_token && significant(error(f)) < significant(error(*b)))) {
      best = i;
    }
  }
  return best;
}

Conclusion conclude(const EvalReport& report) {
  Conclusion c;
  c.max_error = report.options.max_error;
  c.chosen =
      smallest_within(report.formats, c.max_error, [](const FormatResult& f) { return f.error_worst; });
  bool complete = true;
  for (std::size_t l = 0; l < report.layers.size(); ++l) {
    const int best = smallest_within(report.formats, c.max_error,
                                     [&](const FormatResult& f) { return f.layers[l].output.relative; });
    c.per_layer.push_back(best);
    complete &= best >= 0;
    if (best >= 0) {
      c.per_layer_bytes += report.formats[static_cast<std::size_t>(best)].layers[l].bytes_per_token /
                           static_cast<double>(report.layers.size());
    }
  }
  const std::string limit =
      fmt::format("an output error of at most {}", fmt::format("{:g}%", 100 * c.max_error));
  if (c.chosen < 0) {
    const auto best =
        std::min_element(report.formats.begin(), report.formats.end(),
                         [](const auto& a, const auto& b) { return a.error_worst < b.error_worst; });
    c.sentence =
        std::isfinite(best->error_worst)
            ? fmt::format("No format keeps {} in every layer; the most exact, {}, has {}.", limit,
                          best->choice.name, percent(best->error_worst))
            : fmt::format(
                  "No format keeps {} in every layer: the output of every format holds NaN or infinity.",
                  limit);
    return c;
  }
  const FormatResult& chosen = report.formats[static_cast<std::size_t>(c.chosen)];
  c.sentence = fmt::format(
      "For {} in every layer, the smallest format is {}: {:.0f} bytes per token and layer, "
      "{:.2f}x smaller than bf16, error {}.",
      limit, chosen.choice.name, chosen.bytes_per_token, chosen.compression, percent(chosen.error_worst));
  if (complete && c.per_layer_bytes < 0.99 * chosen.bytes_per_token) {
    c.sentence += fmt::format(" Choosing per layer needs {:.0f} bytes on average.", c.per_layer_bytes);
  }
  return c;
}

std::vector<CapturedLayer> select_layers(const SafetensorsReader& file, const EvalOptions& options) {
  std::vector<CapturedLayer> all = find_layers(file, options.order, true);
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

/// Fills in report.formats. Refuses a format that was asked for and does not fit before any work is done.
void choose_formats(const std::vector<CapturedLayer>& layers, EvalReport& report) {
  const auto check = [&](const FormatChoice& choice) {
    for (const CapturedLayer& layer : layers) {
      page_layout(choice.spec(layer.kv_heads, layer.head_dim, layer.v_dim, report.options.page_size));
    }
  };
  if (!report.options.formats.empty()) {
    for (const FormatChoice& choice : report.options.formats) {
      check(choice);
      report.formats.emplace_back().choice = choice;
    }
    return;
  }
  check(parse_choice("bf16", "--formats"));  // what bf16 refuses, no format accepts
  for (const FormatChoice& choice : default_choices()) {
    try {
      check(choice);
      report.formats.emplace_back().choice = choice;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument && error.code() != ErrorCode::kUnsupported) throw;
      report.skipped.push_back(choice.name);
    }
  }
}

}  // namespace

std::vector<CapturedLayer> layers_of(const std::string& path, const EvalOptions& options) {
  std::vector<CapturedLayer> layers = select_layers(SafetensorsReader(path), options);
  for (CapturedLayer& layer : layers) layer.q = layer.k = layer.v = nullptr;
  return layers;
}

EvalReport evaluate(const std::string& path, const EvalOptions& options, Terminal& terminal) {
  const SafetensorsReader file(path);
  const std::vector<CapturedLayer> layers = select_layers(file, options);
  EvalReport report;
  report.file = path;
  report.metadata = file.metadata();
  report.options = options;
  choose_formats(layers, report);
  {
    Progress progress(terminal, static_cast<std::int64_t>(layers.size() * (report.formats.size() + 1)));
    for (const CapturedLayer& captured : layers) {
      progress.step(captured.name() + ": exact attention");
      const EvalOptions own = options_for(file, captured, options);
      const LoadedLayer layer = load_layer(file, captured, own);
      report.layers.push_back(describe_layer(layer, own));
      report.bf16_rounding = std::max(report.bf16_rounding, report.layers.back().bf16_rounding);
      for (FormatResult& format : report.formats) {
        progress.step(captured.name() + ": " + format.choice.name);
        format.layers.push_back(measure(layer, own, {format.choice, {}}));
      }
    }
  }
  for (FormatResult& format : report.formats) summarise(format);
  std::stable_sort(report.formats.begin(), report.formats.end(), [](const auto& a, const auto& b) {
    return std::pair(b.bytes_per_token, significant(a.error_worst)) <
           std::pair(a.bytes_per_token, significant(b.error_worst));
  });
  mark_pareto(report.formats);
  report.conclusion = conclude(report);
  return report;
}

std::vector<LayerResult> evaluate_choices(const std::string& path, const EvalOptions& options,
                                          const std::vector<LayerChoice>& choices, Terminal& terminal) {
  const SafetensorsReader file(path);
  const std::vector<CapturedLayer> layers = select_layers(file, options);
  std::vector<LayerResult> results;
  Progress progress(terminal, static_cast<std::int64_t>(layers.size()));
  for (std::size_t i = 0; i < layers.size(); ++i) {
    progress.step(layers[i].name() + ": " + choices.at(i).choice.name);
    const EvalOptions own = options_for(file, layers[i], options);
    results.push_back(measure(load_layer(file, layers[i], own), own, choices[i]));
  }
  return results;
}

}  // namespace halftone::cli
