#include "cli/eval/capture.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/terminal/terminal.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

constexpr std::int64_t kMaxTokens = 1 << 30;
constexpr std::int64_t kMaxHeads = 1 << 16;
constexpr std::int64_t kMaxDim = 1 << 16;

struct Shape {
  std::int64_t tokens = 0, heads = 0, dim = 0;
};

[[noreturn]] void refuse(const SafetensorsReader& file, const std::string& sentence) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("file '{}': {}", printable(file.path()), sentence));
}

Shape shape_of(const SafetensorsReader& file, const TensorInfo& tensor, AxisOrder order) {
  std::span<const std::int64_t> axes = tensor.shape;
  while (axes.size() > 3 && axes.front() == 1) axes = axes.subspan(1);
  const std::string name = printable(tensor.name);
  if (axes.size() != 3) {
    refuse(
        file,
        fmt::format("tensor '{}' has shape {}, but must be [tokens, heads, dim]: save one sequence per file.",
                    name, tensor.shape_text()));
  }
  const bool float_type =
      tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kFloat16 || tensor.dtype == DType::kBFloat16;
  if (!float_type) {
    refuse(file,
           fmt::format("tensor '{}' is {}, but must be F32, F16 or BF16: convert it before you save it.",
                       name, tensor.dtype_text));
  }
  Shape shape{axes[0], axes[1], axes[2]};
  if (order == AxisOrder::kHeadsTokensDim) std::swap(shape.tokens, shape.heads);
  const auto check = [&](const char* what, std::int64_t value, std::int64_t limit) {
    if (value < 1 || value > limit) {
      refuse(file, fmt::format("tensor '{}' of shape {} has {} {}, but must have 1 to {}: check --layout.",
                               name, tensor.shape_text(), value, what, limit));
    }
  };
  check("tokens", shape.tokens, kMaxTokens);
  check("heads", shape.heads, kMaxHeads);
  check("dims", shape.dim, kMaxDim);
  return shape;
}

std::string tensor_list(const SafetensorsReader& file) {
  std::string list;
  std::size_t n = 0;
  for (const TensorInfo& tensor : file.tensors()) {
    if (n == 6) return list + fmt::format(", ... ({} in all)", file.tensors().size());
    list += (n++ > 0 ? ", " : "") + printable(tensor.name, 40);
  }
  return n == 0 ? "no tensor" : list;
}

void check_layer(const SafetensorsReader& file, AxisOrder order, CapturedLayer& layer) {
  const Shape k = shape_of(file, *layer.k, order);
  const Shape v = layer.v == nullptr ? Shape{k.tokens, k.heads, 0} : shape_of(file, *layer.v, order);
  if (k.tokens != v.tokens || k.heads != v.heads) {
    refuse(file, fmt::format("'{}' has shape {} and '{}' has {}, but tokens and heads must agree{}.",
                             printable(layer.k->name), layer.k->shape_text(), printable(layer.v->name),
                             layer.v->shape_text(), ": save both from one forward pass"));
  }
  layer.tokens = layer.queries = k.tokens;
  layer.kv_heads = layer.q_heads = static_cast<int>(k.heads);
  layer.head_dim = static_cast<int>(k.dim);
  layer.v_dim = static_cast<int>(v.dim);
  if (layer.q == nullptr) return;
  const Shape q = shape_of(file, *layer.q, order);
  const auto unfit = [&](const Shape& a, const Shape& b) {
    return a.dim != b.dim || a.heads % b.heads != 0 || a.tokens > b.tokens;
  };
  if (unfit(q, k)) {
    const bool other = !unfit({q.heads, q.tokens, q.dim}, {k.heads, k.tokens, k.dim});
    refuse(
        file,
        fmt::format(
            "'{}' has shape {} and '{}' has {}: q needs the dim of k, a multiple of its heads and at most "
            "its tokens{}.",
            printable(layer.q->name), layer.q->shape_text(), printable(layer.k->name), layer.k->shape_text(),
            other ? fmt::format("; try --layout {}", order == AxisOrder::kTokensHeadsDim ? "htd" : "thd")
                  : ""));
  }
  layer.half_precision = layer.q->dtype == DType::kFloat16;
  layer.queries = q.tokens;
  layer.q_heads = static_cast<int>(q.heads);
}

}  // namespace

int CapturedLayer::number() const {
  if (label.empty()) return 0;
  const std::size_t dot = label.rfind('.');
  const char* first = label.data() + (dot == std::string::npos ? 0 : dot + 1);
  const char* last = label.data() + label.size();
  int value = 0;
  const auto [end, error] = std::from_chars(first, last, value);
  return error == std::errc() && end == last && value >= 0 ? value : -1;
}

LayerAttention attention_of(const SafetensorsReader& file, const CapturedLayer& layer) {
  LayerAttention attention;
  const auto text = file.metadata().find("attention");
  if (text == file.metadata().end()) return attention;
  const auto all = nlohmann::json::parse(text->second, nullptr, false);
  const std::string number = std::to_string(layer.number());
  if (!all.is_object() || !all.contains(number) || !all[number].is_object())
    return attention;  // another's key
  const auto positive = [&](const char* name) {
    const auto found = all[number].find(name);
    const double value = found != all[number].end() && found->is_number() ? found->get<double>() : 0;
    return std::isfinite(value) && value > 0 && value < 1 << 30 ? value : 0;
  };
  attention.scale = positive("scaling");
  attention.softcap = positive("softcap");
  if (const double window = positive("sliding_window"); window >= 1)
    attention.window = static_cast<int>(window) - 1;
  return attention;
}

AxisOrder parse_axis_order(std::string_view text) {
  if (text == "thd") return AxisOrder::kTokensHeadsDim;
  if (text == "htd") return AxisOrder::kHeadsTokensDim;
  throw UsageError(fmt::format("--layout is '{}', but must be thd or htd: use thd.", printable(text)));
}

std::string_view naming_help() {
  return "Tensors are named layers.<i>.q, layers.<i>.k and layers.<i>.v (any prefix works; plain q, k, v for "
         "one\n"
         "layer), F32, F16 or BF16, shaped [tokens, heads, dim]: the activations that enter attention, "
         "after\n"
         "RoPE. k and v may have fewer heads than q (grouped queries). A leading axis of 1 (batch) is "
         "ignored.\n"
         "[heads, tokens, dim] needs --layout htd, because the two cannot be told apart safely.\n";
}

std::vector<CapturedLayer> find_layers(const SafetensorsReader& file, AxisOrder order, CapturedParts parts) {
  const bool need_q = parts != CapturedParts::kKv, need_v = parts != CapturedParts::kQk;
  const auto less = [](const std::string& a, const std::string& b) { return natural_less(a, b); };
  std::map<std::string, CapturedLayer, decltype(less)> found(less);
  for (const TensorInfo& tensor : file.tensors()) {
    const std::size_t dot = tensor.name.rfind('.');
    const std::string label = dot == std::string::npos ? "" : tensor.name.substr(0, dot);
    const std::string part = dot == std::string::npos ? tensor.name : tensor.name.substr(dot + 1);
    if (part == "q" && need_q) found[label].q = &tensor;
    if (part == "k") found[label].k = &tensor;
    if (part == "v" && need_v) found[label].v = &tensor;
  }
  if (found.empty()) {
    const bool weights = std::any_of(file.tensors().begin(), file.tensors().end(),
                                     [](const TensorInfo& t) { return t.name.ends_with(".weight"); });
    const bool packed = std::any_of(file.tensors().begin(), file.tensors().end(),
                                    [](const TensorInfo& t) { return t.name.ends_with(".pages"); });
    refuse(file, fmt::format("it holds {}, but no layers.<i>.q, .k{}{}.", tensor_list(file),
                             need_v ? " and .v" : "",
                             weights  ? ": these are weights; capture the activations that enter attention"
                             : packed ? ": this is a packed cache; run `halftone dequantize` first"
                                      : ": rename the captured tensors"));
  }
  std::vector<CapturedLayer> layers;
  for (auto& [label, layer] : found) {
    layer.label = label;
    const char* missing = layer.k == nullptr             ? "k"
                          : need_v && layer.v == nullptr ? "v"
                          : need_q && layer.q == nullptr ? "q"
                                                         : nullptr;
    if (missing != nullptr) {
      refuse(file, fmt::format("it lacks '{}{}{}': save {} of every layer.", printable(label),
                               label.empty() ? "" : ".", missing,
                               !need_q  ? "k and v"
                               : need_v ? "q, k and v"
                                        : "q and k"));
    }
    check_layer(file, order, layer);
    layers.push_back(layer);
  }
  return layers;
}

reference::Tensor load_tensor(const SafetensorsReader& file, const TensorInfo& tensor, AxisOrder order,
                              std::int64_t first, std::int64_t count) {
  const Shape shape = shape_of(file, tensor, order);
  const auto row = static_cast<std::size_t>(shape.dim * dtype_bits(*tensor.dtype) / 8);
  reference::Tensor result(*tensor.dtype, {count, shape.heads, shape.dim});
  const std::span<std::byte> out = std::as_writable_bytes(result.bytes());
  if (order == AxisOrder::kTokensHeadsDim) {
    file.read(tensor, static_cast<std::uint64_t>(first * shape.heads) * row, out);
    return result;
  }
  std::vector<std::byte> head(static_cast<std::size_t>(count) * row);
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    file.read(tensor, static_cast<std::uint64_t>(h * shape.tokens + first) * row, head);
    for (std::int64_t t = 0; t < count; ++t) {
      std::memcpy(out.data() + static_cast<std::size_t>(t * shape.heads + h) * row,
                  head.data() + static_cast<std::size_t>(t) * row, row);
    }
  }
  return result;
}

KeysAndValues load_keys_and_values(const SafetensorsReader& file, const CapturedLayer& layer, AxisOrder order,
                                   std::int64_t count) {
  KeysAndValues kv{load_tensor(file, *layer.k, order, 0, count),
                   load_tensor(file, *layer.v, order, 0, count)};
  if (kv.k.dtype() == kv.v.dtype()) return kv;
  for (reference::Tensor* tensor : {&kv.k, &kv.v}) {
    *tensor = reference::Tensor::of(DType::kFloat32, tensor->shape(), tensor->to_floats());
  }
  return kv;
}

std::vector<float> to_finite_floats(const reference::Tensor& tensor, std::string_view name) {
  std::vector<float> values = tensor.to_floats();
  const auto bad = std::find_if(values.begin(), values.end(), [](float x) { return !std::isfinite(x); });
  if (bad != values.end()) {
    const std::int64_t row = tensor.shape()[1] * tensor.shape()[2];
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("tensor '{}' holds {} at token {}, but values must be finite: capture it again.",
                            printable(name), *bad, (bad - values.begin()) / row));
  }
  return values;
}

}  // namespace halftone::cli
