#include "cli/files/packed.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

[[noreturn]] void corrupt(const SafetensorsReader& file, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile,
              fmt::format("file '{}': {}: quantize the capture again.", printable(file.path()), what));
}

/// What a spec calls for beside its pages: name and shape.
struct ScaleTensor {
  const char* name;
  std::vector<std::int64_t> shape;
  reference::Tensor OwnedCache::*member;
};

std::vector<ScaleTensor> scale_tensors(const KvCacheSpec& spec) {
  std::vector<ScaleTensor> tensors;
  const auto add = [&](const KvFormat& format, const char* scale, reference::Tensor OwnedCache::*scale_member,
                       const char* min, reference::Tensor OwnedCache::*min_member) {
    if (!format.static_scale()) return;
    const std::int64_t values = format.granularity == Granularity::kHead ? spec.kv_heads : 1;
    tensors.push_back({scale, {values}, scale_member});
    if (format.asymmetric) tensors.push_back({min, {values}, min_member});
  };
  add(spec.k_format, "k_scale", &OwnedCache::k_scale, "k_min", &OwnedCache::k_min);
  add(spec.v_format, "v_scale", &OwnedCache::v_scale, "v_min", &OwnedCache::v_min);
  const std::vector<std::int64_t> channels = {spec.kv_heads, spec.head_dim};
  if (spec.offset_k) tensors.push_back({"k_offset", channels, &OwnedCache::k_offset});
  if (spec.scale_k) tensors.push_back({"k_channel_scale", channels, &OwnedCache::k_channel_scale});
  return tensors;
}

std::string full_name(const std::string& label, const char* part) {
  return label.empty() ? part : label + "." + part;
}

const TensorInfo& require(const SafetensorsReader& file, const std::string& name, DType dtype,
                          const std::vector<std::int64_t>& shape) {
  const TensorInfo* tensor = file.find(name);
  if (tensor == nullptr) corrupt(file, fmt::format("tensor '{}' is missing", printable(name)));
  if (tensor->dtype != dtype || tensor->shape != shape) {
    corrupt(file, fmt::format("tensor '{}' is {} {}, which does not fit its spec", printable(name),
                              tensor->dtype_text, tensor->shape_text()));
  }
  return *tensor;
}

PackedLayer check_layer(const SafetensorsReader& file, const std::string& label,
                        const std::string& spec_text) {
  PackedLayer layer;
  layer.label = label;
  layer.spec = spec_from_json(spec_text,
                              fmt::format("file '{}', layer '{}'", printable(file.path()), printable(label)));
  const std::int64_t page_bytes = page_layout(layer.spec).page_bytes;
  layer.pages = file.find(full_name(label, "pages"));
  if (layer.pages == nullptr)
    corrupt(file, fmt::format("tensor '{}' is missing", printable(full_name(label, "pages"))));
  const std::vector<std::int64_t>& shape = layer.pages->shape;
  if (layer.pages->dtype != DType::kUInt8 || shape.size() != 2 || shape[1] != page_bytes || shape[0] < 1 ||
      shape[0] > (std::int64_t{1} << 30) / layer.spec.page_size) {
    corrupt(file, fmt::format("tensor '{}' is {} {}, but its spec needs U8 [pages, {}]",
                              printable(layer.pages->name), layer.pages->dtype_text,
                              layer.pages->shape_text(), page_bytes));
  }
  const TensorInfo& lengths = require(file, full_name(label, "lengths"), DType::kInt32, {1});
  std::array<std::int32_t, 1> tokens{};
  file.read(lengths, 0, std::as_writable_bytes(std::span(tokens)));
  layer.tokens = tokens[0];
  if (layer.tokens < 0 || layer.tokens > shape[0] * layer.spec.page_size) {
    corrupt(file,
            fmt::format("'{}' says {} tokens, but {} pages of {} hold at most {}", printable(lengths.name),
                        layer.tokens, shape[0], layer.spec.page_size, shape[0] * layer.spec.page_size));
  }
  for (const ScaleTensor& t : scale_tensors(layer.spec)) {
    require(file, full_name(label, t.name), DType::kFloat32, t.shape);
  }
  return layer;
}

}  // namespace

std::string spec_to_json(const KvCacheSpec& spec) {
  nlohmann::ordered_json json{{"k_format", format_name(spec.k_format)},
                              {"v_format", format_name(spec.v_format)},
                              {"kv_heads", spec.kv_heads},
                              {"head_dim", spec.head_dim},
                              {"v_head_dim", spec.v_dim()},
                              {"page_size", spec.page_size},
                              {"rotate_k", spec.rotate_k},
                              {"rotate_v", spec.rotate_v}};
  if (spec.is_latent()) json["rope_dim"] = spec.rope_dim;
  if (spec.offset_k) json["offset_k"] = true;  // specs without it are as they were
  if (spec.scale_k) json["scale_k"] = true;
  return json.dump();
}

KvCacheSpec spec_from_json(const std::string& text, const std::string& where) {
  const auto refuse = [&](const std::string& why) -> Error {
    return {ErrorCode::kCorruptFile,
            fmt::format("{}: its cache spec {}: quantize the capture again.", where, why)};
  };
  // The spec is flat: refuse nesting before a document of it is built.
  const auto flat = [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) { return depth <= 1; };
  const nlohmann::json json =
      text.size() > 4096 ? nlohmann::json() : nlohmann::json::parse(text, flat, /*allow_exceptions=*/false);
  if (!json.is_object()) throw refuse("is not a JSON object");
  try {
    KvCacheSpec spec;
    spec.k_format = parse_format(json.at("k_format").get_ref<const std::string&>());
    spec.v_format = parse_format(json.at("v_format").get_ref<const std::string&>());
    const auto integer = [&](const char* key) {
      if (!json.at(key).is_number_unsigned() || json.at(key).get<std::uint64_t>() > (1U << 20)) {
        throw refuse(fmt::format("has a bad {}", key));
      }
      return json.at(key).get<int>();
    };
    spec.kv_heads = integer("kv_heads");
    spec.head_dim = integer("head_dim");
    spec.v_head_dim = integer("v_head_dim");
    spec.page_size = integer("page_size");
    spec.rotate_k = json.at("rotate_k").get<bool>();
    spec.rotate_v = json.at("rotate_v").get<bool>();
    if (json.contains("rope_dim")) spec.rope_dim = integer("rope_dim");  // only latent caches say it
    if (json.contains("offset_k")) spec.offset_k = json.at("offset_k").get<bool>();
    if (json.contains("scale_k")) spec.scale_k = json.at("scale_k").get<bool>();
    page_layout(spec);
    return spec;
  } catch (const nlohmann::json::exception&) {
    throw refuse("lacks a field or has one of the wrong type");
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kCorruptFile) throw;
    throw refuse(fmt::format("is not usable ({})", error.what()));
  }
}

void declare_packed_layer(const std::string& label, const KvCacheSpec& spec, std::int64_t tokens,
                          std::vector<TensorDeclaration>& tensors,
                          std::map<std::string, std::string>& metadata) {
  const std::int64_t pages = (tokens + spec.page_size - 1) / spec.page_size;
  tensors.push_back({full_name(label, "pages"), DType::kUInt8, {pages, page_layout(spec).page_bytes}});
  tensors.push_back({full_name(label, "lengths"), DType::kInt32, {1}});
  for (const ScaleTensor& t : scale_tensors(spec)) {
    tensors.push_back({full_name(label, t.name), DType::kFloat32, t.shape});
  }
  metadata["format"] = kPackedFormat;
  metadata[full_name(label, "spec")] = spec_to_json(spec);
}

void write_packed_layer(SafetensorsWriter& writer, const OwnedCache& cache) {
  const auto write = [&](const reference::Tensor& tensor) { writer.write(std::as_bytes(tensor.bytes())); };
  write(cache.pages);
  write(cache.lengths);
  for (const ScaleTensor& t : scale_tensors(cache.spec)) write(cache.*t.member);
}

std::vector<PackedLayer> find_packed_layers(const SafetensorsReader& file) {
  const auto format = file.metadata().find("format");
  if (format == file.metadata().end() || format->second != kPackedFormat) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("file '{}' is no packed cache (its metadata lacks format = {}): write it with `halftone "
                    "quantize`.",
                    printable(file.path()), kPackedFormat));
  }
  std::vector<PackedLayer> layers;
  for (const auto& [key, text] : file.metadata()) {
    if (key == "spec" || key.ends_with(".spec")) {
      layers.push_back(check_layer(file, key == "spec" ? "" : key.substr(0, key.size() - 5), text));
    }
  }
  if (layers.empty()) corrupt(file, "its metadata names no layer");
  std::sort(layers.begin(), layers.end(),
            [](const auto& a, const auto& b) { return natural_less(a.label, b.label); });
  return layers;
}

OwnedCache load_packed_layer(const SafetensorsReader& file, const PackedLayer& layer) {
  OwnedCache cache(layer.spec, 1, layer.pages->shape[0] * layer.spec.page_size);
  file.read(*layer.pages, 0, std::as_writable_bytes(cache.pages.bytes()));
  cache.lengths.as<std::int32_t>()[0] = static_cast<std::int32_t>(layer.tokens);
  for (const ScaleTensor& t : scale_tensors(layer.spec)) {
    reference::Tensor values(DType::kFloat32, t.shape);
    const std::string name = full_name(layer.label, t.name);
    file.read(*file.find(name), 0, std::as_writable_bytes(values.bytes()));
    const bool scale = name.ends_with("_scale");
    for (const float x : values.as<float>()) {
      if (!std::isfinite(x) || (scale && x <= 0)) {
        corrupt(file, fmt::format("tensor '{}' holds {}, but must be finite{}", printable(name), x,
                                  scale ? " and above 0" : ""));
      }
    }
    cache.*t.member = std::move(values);
  }
  return cache;
}

}  // namespace halftone::cli
