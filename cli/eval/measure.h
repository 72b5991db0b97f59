// One layer's q, k and v in memory, the truth about them, and what a cache in some format makes of it.
#pragma once

#include "cli/eval/evaluate.h"
#include "reference/oracle.h"
#include "reference/tensor.h"

namespace halftone::cli {

/// A layer in memory, with the truth about it.
struct LoadedLayer {
  CapturedLayer shape;        ///< tokens and queries after --tokens and --max-queries
  reference::Tensor q, k, v;  ///< [tokens, heads, dim]
  std::vector<float> k_values, v_values;
  reference::OracleResult truth;
};

/// The layers of a file that options leave, with their tensors. Throws UsageError.
std::vector<CapturedLayer> select_layers(const SafetensorsReader& file, const EvalOptions& options,
                                         CapturedParts parts);

/// The options for a layer: where they leave attention open, the file says how it is.
EvalOptions options_for(const SafetensorsReader& file, const CapturedLayer& layer, EvalOptions options);

/// The layer of a file. One without v is a latent's, whose V is the first v_dim dims of k.
LoadedLayer load_layer(const SafetensorsReader& file, const CapturedLayer& captured,
                       const EvalOptions& options);

/// `layer`, of which shape, q, k and, unless it is the first v_dim dims of k, v are there, with the rest.
/// Throws InvalidArgument when a value is NaN or infinite.
LoadedLayer complete_layer(LoadedLayer layer, const EvalOptions& options);

/// Error of rounding the exact output to bf16, nothing else.
double bf16_rounding(const LoadedLayer& layer);

/// What a cache of the spec makes of a layer; `scales` empty: calibrated on it.
struct Measured {
  LayerResult result;
  reference::Tensor out;  ///< f32 [queries, q_heads, v_dim]
};
Measured measure(const LoadedLayer& layer, const EvalOptions& options, KvCacheSpec spec,
                 const StaticScales& scales = {});

}  // namespace halftone::cli
