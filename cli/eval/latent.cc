#include "cli/eval/latent.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cli/eval/measure.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"
#include "reference/random.h"

namespace halftone::cli {
namespace {

using reference::Data;
using reference::Random;
using reference::Tensor;

constexpr const char* kDefaultFormats = "bf16,fp8-g128-f32,fp8-g64-e8m0,int8-g64,int4-g64";
constexpr int kRotaryDims[] = {64, 32};
constexpr int kValueDims[] = {512, 256};

/// How K's dims are divided: V's 256 or 512 with rotary ones behind them, or among them. The spec is that of
/// bf16.
std::optional<KvCacheSpec> spec_of_dims(int head_dim, int page_size) {
  for (const int v_dim : kValueDims) {
    if (head_dim == v_dim) return KvCacheSpec::latent({}, v_dim - 64, 64, page_size, true);
    for (const int rope_dim : kRotaryDims) {
      if (head_dim == v_dim + rope_dim) return KvCacheSpec::latent({}, v_dim, rope_dim, page_size);
    }
  }
  return std::nullopt;
}

KvCacheSpec with_format(KvCacheSpec spec, const KvFormat& format) {
  spec.k_format = spec.v_format = format;
  return spec;
}

/// A layer that is there, or one to be generated.
struct Source {
  CapturedLayer shape;
  KvCacheSpec spec;  ///< of bf16
  Data data = Data::kNormal;
};

std::vector<Source> captured_sources(const SafetensorsReader& file, const EvalOptions& options) {
  std::vector<Source> sources;
  for (CapturedLayer& layer : select_layers(file, options, CapturedParts::kQk)) {
    const auto spec = spec_of_dims(layer.head_dim, options.page_size);
    if (layer.kv_heads != 1 || !spec) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("file '{}': tensor '{}' has shape {}, but a latent has 1 head and 512 + 64, 512 + "
                      "32, 256 + 64, 256 + 32, 448 + 64 or 192 + 64 dims: capture it with its rotary "
                      "dims at the end.",
                      printable(file.path()), printable(layer.k->name), layer.k->shape_text()));
    }
    layer.v_dim = spec->v_dim();
    sources.push_back({layer, *spec});
  }
  return sources;
}

/// The token of DeepSeek V2 and V3, and the one all of whose dims are V.
std::vector<Source> generated_sources(const EvalOptions& options) {
  std::vector<Source> sources;
  for (const Data data : {Data::kNormal, Data::kOutlierChannels}) {
    for (const int head_dim : {576, 512}) {
      const KvCacheSpec spec = *spec_of_dims(head_dim, options.page_size);
      CapturedLayer shape;
      shape.label = data == Data::kNormal ? "normal" : "outliers";
      shape.tokens = options.tokens;
      shape.queries = std::min(options.max_queries, options.tokens);
      shape.q_heads = kLatentHeads;
      shape.kv_heads = 1;
      shape.head_dim = head_dim;
      shape.v_dim = spec.v_dim();
      sources.push_back({shape, spec, data});
    }
  }
  return sources;
}

LoadedLayer generate(const Source& source, const EvalOptions& options) {
  Random random(kLatentSeed);
  LoadedLayer layer;
  layer.shape = source.shape;
  const int dim = source.shape.head_dim;
  const auto draw = [&](Data data, std::int64_t tokens, int heads) {
    std::vector<float> x(static_cast<std::size_t>(tokens * heads * dim));
    fill(random, data, x, heads, dim);
    return Tensor::of(DType::kFloat32, {tokens, heads, dim}, x);
  };
  layer.k = draw(source.data, source.shape.tokens, 1);
  layer.q = draw(Data::kNormal, source.shape.queries, source.shape.q_heads);
  return complete_layer(std::move(layer), options);
}

/// Whether page_layout() takes the format for a source.
bool accepts(const Source& source, const KvFormat& format) {
  try {
    page_layout(with_format(source.spec, format));
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// Throws if one of the formats fits no source.
void check_formats(const std::vector<FormatChoice>& formats, const std::vector<Source>& sources) {
  for (const FormatChoice& choice : formats) {
    const bool fits = std::any_of(sources.begin(), sources.end(),
                                  [&](const Source& source) { return accepts(source, choice.k); });
    if (!fits) page_layout(with_format(sources.front().spec, choice.k));  // throws why
  }
}

std::vector<int> outliers_of(const LoadedLayer& layer) {
  const std::vector<float> absmax = channel_stats(layer.k_values, 1, layer.shape.head_dim).absmax;
  const double limit = kOutlierRatio * median({absmax.begin(), absmax.end()});
  std::vector<int> outliers;
  for (int i = 0; i < layer.shape.head_dim; ++i) {
    if (absmax[static_cast<std::size_t>(i)] > limit) outliers.push_back(i);
  }
  return outliers;
}

/// The relative error of the output without some channels.
double error_without(const std::vector<int>& channels, const LoadedLayer& layer, std::span<const float> out) {
  std::vector<int> kept;
  for (int i = 0; i < layer.shape.v_dim; ++i) {
    if (!std::binary_search(channels.begin(), channels.end(), i)) kept.push_back(i);
  }
  if (kept.empty()) return 0;
  std::vector<double> truth;
  std::vector<float> actual;
  for (std::size_t row = 0; row < out.size(); row += static_cast<std::size_t>(layer.shape.v_dim)) {
    for (const int i : kept) {
      truth.push_back(layer.truth.out[row + static_cast<std::size_t>(i)]);
      actual.push_back(out[row + static_cast<std::size_t>(i)]);
    }
  }
  return compare_output(truth, actual, 1, static_cast<int>(kept.size())).relative;
}

LatentLayer measure_formats(const LoadedLayer& layer, const Source& source, const EvalOptions& own,
                            LatentReport& report, Progress& progress) {
  LatentLayer result;
  result.shape = layer.shape;
  result.shape.q = result.shape.k = nullptr;
  result.attention = {own.scale, own.softcap, own.window};
  result.rope_dim = source.spec.rope_dim;
  result.rotary_v = source.spec.v_dim() == source.spec.head_dim;
  result.outliers = outliers_of(layer);
  result.bf16_rounding = bf16_rounding(layer);
  for (const FormatChoice& choice : report.options.formats) {
    progress.step(layer.shape.name() + ": " + choice.name);
    if (!accepts(source, choice.k)) {
      std::string text =
          fmt::format("{} with {} + {} dims", choice.name, source.spec.latent_dim(), source.spec.rope_dim);
      if (std::ranges::find(report.skipped, text) == report.skipped.end())
        report.skipped.push_back(std::move(text));
      continue;
    }
    const Measured measured = measure(layer, own, with_format(source.spec, choice.k));
    result.formats.push_back(
        {choice.k, measured.result, error_without(result.outliers, layer, measured.out.as<float>())});
  }
  return result;
}

}  // namespace

LatentReport evaluate_latents(const std::string& path, const EvalOptions& options, Terminal& terminal) {
  LatentReport report{.file = path, .options = options, .layers = {}, .skipped = {}};
  EvalOptions& used = report.options;
  used.timed = false;
  const bool chosen = !used.formats.empty();
  if (!chosen) used.formats = parse_choices(kDefaultFormats, "--formats");
  std::optional<SafetensorsReader> file;
  if (!path.empty()) file.emplace(path);
  if (!file && used.tokens == 0) used.tokens = kLatentTokens;
  const std::vector<Source> sources = file ? captured_sources(*file, used) : generated_sources(used);
  if (chosen) check_formats(used.formats, sources);
  Progress progress(terminal, static_cast<std::int64_t>(sources.size() * (used.formats.size() + 1)));
  for (const Source& source : sources) {
    progress.step(source.shape.name() + ": exact attention");
    const EvalOptions own = file ? options_for(*file, source.shape, used) : used;
    const LoadedLayer layer = file ? load_layer(*file, source.shape, own) : generate(source, own);
    report.layers.push_back(measure_formats(layer, source, own, report, progress));
  }
  return report;
}

}  // namespace halftone::cli
