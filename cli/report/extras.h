// What the page of `eval` and `recipe` says beside the errors: a recipe, what fits a memory, times and losses
// that were measured elsewhere.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/eval/evaluate.h"
#include "cli/options/command_line.h"
#include "cli/recipe/check.h"

namespace halftone::cli {

/// The options as given.
struct ExtraOptions {
  std::string memory, bench, quality, recipe;
  int model_layers = 0;
};

/// --memory, --model-layers, --bench, --quality; `options` must live as long as the parser.
void add_extra_options(Command command, ExtraOptions& options);

/// Of a model whose cache has a format, against the same model with its own cache.
struct Quality {
  double kl = 0;  ///< mean divergence of the distributions of the next token, nats
  double perplexity = 0;
};

struct ReportExtras {
  int model_layers = 0;                    ///< of which a token takes bytes; those captured unless told
  double memory = 0;                       ///< bytes for the cache; 0: not known
  std::string memory_text;                 ///< "80 GB", "NVIDIA H200: 139.8 GiB"
  std::map<std::string, double> step_us;   ///< of one layer of decode, by the format's name
  std::string step_text;                   ///< where and at which shape
  std::map<std::string, Quality> quality;  ///< by the format's name; "recipe"
  double exact_perplexity = 0;
  std::string quality_text;
  std::optional<RecipeReport> recipe;
};

/// "80GB", "24GiB" or "500M" as bytes: G is 10^9, Gi 2^30. Throws UsageError.
double parse_memory(const std::string& text, const std::string& option);

/// Reads the files. Throws UsageError, and InvalidArgument naming what is wrong with a file.
ReportExtras read_extras(const ExtraOptions& options, const std::vector<CapturedLayer>& layers);

/// The page; see html.cc.
std::string to_html(const EvalReport& report, const ReportExtras& extras);

}  // namespace halftone::cli
