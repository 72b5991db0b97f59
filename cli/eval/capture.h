// Captured attention activations in a safetensors file: which tensors are q, k and v of which layer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/files/safetensors.h"
#include "reference/tensor.h"

namespace halftone::cli {

/// The order of a tensor's axes. Leading axes of extent 1 (a batch) are ignored in both.
enum class AxisOrder {
  kTokensHeadsDim,  ///< [tokens, heads, dim]
  kHeadsTokensDim,  ///< [heads, tokens, dim]
};

/// "thd" or "htd"; throws UsageError.
AxisOrder parse_axis_order(std::string_view text);

/// One layer of a capture; all shapes are checked.
struct CapturedLayer {
  std::string label;              ///< "layers.0", or "" for plain q, k, v
  const TensorInfo* q = nullptr;  ///< null when q was not asked for
  const TensorInfo* k = nullptr;
  const TensorInfo* v = nullptr;  ///< likewise
  std::int64_t tokens = 0;        ///< keys
  std::int64_t queries = 0;       ///< the last `queries` of the tokens ask
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int v_dim = 0;                ///< 0 when v was not asked for
  bool half_precision = false;  ///< q is F16

  /// The number at the end of the label, 0 of plain q, k, v; -1 when there is none.
  int number() const;
  std::string name() const { return label.empty() ? "q, k, v" : label; }
};

/// How a layer's attention differs from softmax(Q K^T / sqrt(head_dim)) V with a causal mask.
struct LayerAttention {
  double scale = 0;    ///< of the logits; 0: 1/sqrt(head_dim)
  double softcap = 0;  ///< 0: none
  int window = -1;     ///< keys to the left that a query sees; -1: all
};

/// What the file's metadata says of a layer, as `python -m halftone.capture` writes it: "attention", a JSON
/// object with "scaling", "softcap" and "sliding_window" (with the query's own key) by the layer's number.
LayerAttention attention_of(const SafetensorsReader& file, const CapturedLayer& layer);

/// How tensors must be named; for help texts.
std::string_view naming_help();

/// The tensors of a layer that a command reads.
enum class CapturedParts {
  kKv,
  kQkv,
  kQk,  ///< of a latent, whose V is a part of k
};

/// Layers in natural order. Throws InvalidArgument naming the tensor that is missing or does not fit.
std::vector<CapturedLayer> find_layers(const SafetensorsReader& file, AxisOrder order, CapturedParts parts);

/// Tokens [first, first + count) of a tensor as [count, heads, dim] in the file's dtype.
reference::Tensor load_tensor(const SafetensorsReader& file, const TensorInfo& tensor, AxisOrder order,
                              std::int64_t first, std::int64_t count);

/// K and V of the first `count` tokens. Where their dtypes differ both are widened to f32, which changes no
/// value: append takes one dtype for the two.
struct KeysAndValues {
  reference::Tensor k, v;
};
KeysAndValues load_keys_and_values(const SafetensorsReader& file, const CapturedLayer& layer, AxisOrder order,
                                   std::int64_t count);

/// load_tensor, widened to f32. Throws InvalidArgument when a value is NaN or infinite.
std::vector<float> to_finite_floats(const reference::Tensor& tensor, std::string_view name);

}  // namespace halftone::cli
