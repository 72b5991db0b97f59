#include "cli/eval/evaluate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "cli/eval/measure.h"
#include "cli/terminal/text.h"
#include "format/hadamard.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

LayerReport describe_layer(const LoadedLayer& layer, const EvalOptions& options) {
  LayerReport report;
  report.shape = layer.shape;
  report.attention = {options.scale, options.softcap, options.window};
  report.shape.q = report.shape.k = report.shape.v = nullptr;
  report.bf16_rounding = bf16_rounding(layer);
  report.k_channels = channel_stats(layer.k_values, layer.shape.kv_heads, layer.shape.head_dim);
  std::vector<float> rotated = layer.k_values;
  const auto dim = static_cast<std::size_t>(layer.shape.head_dim);
  for (std::size_t i = 0; i < rotated.size(); i += dim) hadamard::rotate(&rotated[i], layer.shape.head_dim);
  report.k_channels_rotated = channel_stats(rotated, layer.shape.kv_heads, layer.shape.head_dim);
  return report;
}

LayerResult measure_choice(const LoadedLayer& layer, const EvalOptions& options, const LayerChoice& stored) {
  const CapturedLayer& shape = layer.shape;
  const KvCacheSpec spec = stored.choice.spec(shape.kv_heads, shape.head_dim, shape.v_dim, options.page_size);
  return measure(layer, options, spec, stored.scales).result;
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
  std::vector<CapturedLayer> layers = select_layers(SafetensorsReader(path), options, CapturedParts::kQkv);
  for (CapturedLayer& layer : layers) layer.q = layer.k = layer.v = nullptr;
  return layers;
}

EvalReport evaluate(const std::string& path, const EvalOptions& options, Terminal& terminal) {
  const SafetensorsReader file(path);
  const std::vector<CapturedLayer> layers = select_layers(file, options, CapturedParts::kQkv);
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
        format.layers.push_back(measure_choice(layer, own, {format.choice, {}}));
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
  const std::vector<CapturedLayer> layers = select_layers(file, options, CapturedParts::kQkv);
  std::vector<LayerResult> results;
  Progress progress(terminal, static_cast<std::int64_t>(layers.size()));
  for (std::size_t i = 0; i < layers.size(); ++i) {
    progress.step(layers[i].name() + ": " + choices.at(i).choice.name);
    const EvalOptions own = options_for(file, layers[i], options);
    results.push_back(measure_choice(load_layer(file, layers[i], own), own, choices[i]));
  }
  return results;
}

}  // namespace halftone::cli
