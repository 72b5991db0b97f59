// What every format costs on captured activations: the measurement behind `halftone eval`.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/eval/capture.h"
#include "cli/figures/metrics.h"
#include "cli/files/owned_cache.h"
#include "cli/options/format_choice.h"
#include "cli/terminal/terminal.h"
#include "halftone/attention.h"

namespace halftone::cli {

struct EvalOptions {
  std::vector<FormatChoice> formats;  ///< empty: every named format that fits
  AxisOrder order = AxisOrder::kTokensHeadsDim;
  int page_size = 64;
  std::int64_t tokens = 0;          ///< use the first tokens only; 0: all
  std::int64_t max_queries = 2048;  ///< judge the last queries only; the oracle's time is queries x tokens
  std::vector<int> layers;          ///< positions of the layers to use; empty: all
  double scale = 0;                 ///< of the logits; 0: what the file says, else 1/sqrt(head_dim)
  double softcap = 0;               ///< 0: what the file says, else none
  int window = -1;                  ///< keys to the left that a query sees; -1: what the file says, else all
  Arithmetic arithmetic = Arithmetic::k16Bit;  ///< of what is measured; the truth is in double precision
  bool timed = true;                           ///< measure times, too
  double max_error = 0.02;  ///< limit of the conclusion: relative output error of the worst layer
};

/// One format on one layer, against attention in double precision on the data as captured.
struct LayerResult {
  double bytes_per_token = 0;
  double compression = 0;  ///< against bf16
  double k_snr = 0;        ///< dB; infinity when K is stored exactly
  double v_snr = 0;
  OutputError output;
  double lse_error = 0;   ///< largest absolute error of the log-sum-exp, in nats
  double prefill_us = 0;  ///< all queries in one call; best of a few calls
  double decode_us = 0;   ///< the last query alone
  StaticScales scales;    ///< that were used
};

/// How a layer is stored.
struct LayerChoice {
  FormatChoice choice;
  StaticScales scales;  ///< of formats that have them; empty: calibrated on the layer
};

struct FormatResult {
  FormatChoice choice;
  std::vector<LayerResult> layers;
  double bytes_per_token = 0;  ///< mean over layers
  double compression = 0;
  double k_snr = 0;  ///< smallest over layers
  double v_snr = 0;
  double error_mean = 0;   ///< of the layers' relative output errors
  double error_worst = 0;  ///< infinite when an output holds a value that is not finite
  double worst_cosine = 1;
  double lse_error = 0;
  double prefill_us = 0;  ///< sum over layers
  double decode_us = 0;
  bool pareto =
      false;  ///< a finite error; no other format is smaller and as exact, or as small and more exact
};

struct LayerReport {
  CapturedLayer shape;       ///< tensors are not valid after the file is closed
  LayerAttention attention;  ///< that was computed
  double bf16_rounding = 0;  ///< error of rounding the exact output to bf16, nothing else
  ChannelStats k_channels;
  ChannelStats k_channels_rotated;
};

/// The answer to "which format?".
struct Conclusion {
  double max_error = 0;
  int chosen = -1;             ///< position in `formats`, or -1 when none is good enough
  std::vector<int> per_layer;  ///< smallest format that is good enough for each layer, or -1
  double per_layer_bytes = 0;  ///< mean bytes per token of that mixture
  std::string sentence;
};

struct EvalReport {
  std::string file;
  std::map<std::string, std::string> metadata;  ///< of the file
  EvalOptions options;
  std::vector<LayerReport> layers;
  std::vector<FormatResult> formats;  ///< by falling bytes per token
  std::vector<std::string> skipped;   ///< named formats that do not fit the head dimensions
  Conclusion conclusion;
  double bf16_rounding = 0;  ///< largest over layers
};

/// The layers that options leave of a file, in its order; their tensors are not valid. Reads no values.
std::vector<CapturedLayer> layers_of(const std::string& path, const EvalOptions& options);

/// Throws Error on bad files and UsageError on options that do not fit them.
EvalReport evaluate(const std::string& path, const EvalOptions& options, Terminal& terminal);

/// Measures `choices`, in the order of the file's layers (of options.layers, if there are some), like
/// evaluate() does: each as the only format of its layer.
std::vector<LayerResult> evaluate_choices(const std::string& path, const EvalOptions& options,
                                          const std::vector<LayerChoice>& choices, Terminal& terminal);

/// The machine-readable form, fields named as here. An SNR of +infinity is null, any other figure that is not
/// finite the text "inf" or "-inf": JSON has no such number, and null would pass for a small one.
nlohmann::ordered_json to_json(const EvalReport& report);

}  // namespace halftone::cli
