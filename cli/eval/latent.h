// What each format of a latent (MLA) cache costs, on generated latents or captured ones: `halftone eval
// --latent`.
#pragma once

#include "cli/eval/evaluate.h"

namespace halftone::cli {

/// One format on one layer.
struct LatentResult {
  KvFormat format;
  LayerResult result;
  double ordinary_error = 0;  ///< of the output's channels that are no outliers, relative like the output's
};

struct LatentLayer {
  CapturedLayer shape;       ///< without tensors
  LayerAttention attention;  ///< that was computed
  int rope_dim = 0;          ///< the last dims of K
  bool rotary_v = false;     ///< V is all of K, else what comes before these
  /// Dims of K whose largest magnitude is more than kOutlierRatio times that of the median dim.
  std::vector<int> outliers;
  double bf16_rounding = 0;  ///< error of rounding the exact output to bf16, nothing else
  std::vector<LatentResult> formats;
};
inline constexpr double kOutlierRatio = 5;

struct LatentReport {
  std::string file;  ///< empty: generated
  EvalOptions options;
  std::vector<LatentLayer> layers;
  std::vector<std::string> skipped;  ///< "fp8-g128-f32 with 448 + 64 dims": formats that do not fit a layer
};

/// What is generated where there is no file: queries of so many heads, of the last tokens.
inline constexpr int kLatentHeads = 16;
inline constexpr std::int64_t kLatentTokens = 2048, kLatentQueries = 32;
inline constexpr std::uint64_t kLatentSeed = 1;

/// Measures options.formats (empty: bf16, the formats of 656 and of 584 bytes, int8 and int4 in groups of 64)
/// on the layers' q and k of a file or, if `path` is empty, on generated ones: N(0, 1), with and without
/// outlier channels (reference::Data::kOutlierChannels), in f32. Throws as evaluate().
LatentReport evaluate_latents(const std::string& path, const EvalOptions& options, Terminal& terminal);

/// Fields named as here and in evaluate.h's form.
nlohmann::ordered_json to_json(const LatentReport& report);

void print_latents(Terminal& terminal, const LatentReport& report);

}  // namespace halftone::cli
