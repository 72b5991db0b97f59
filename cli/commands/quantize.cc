// `halftone quantize` and `halftone dequantize`: captures to packed caches and back.
#include <fmt/format.h>

#include "cli/commands/command.h"
#include "cli/eval/capture.h"
#include "cli/files/outputs.h"
#include "cli/files/packed.h"
#include "cli/options/format_choice.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

struct QuantizeOptions {
  std::string in, out;
  std::string format = "int8-head", v_format;
  std::string layout = "thd";
  bool rotate_k = false, rotate_v = false;
  int page_size = 64;
};

/// Both commands write one file from another.
void check_files(const std::string& in, const std::string& out) {
  if (out == "-") {
    throw UsageError(
        "out is '-', but standard output is for the summary: name a file (./- if it is called so).");
  }
  check_outputs({"the input", in}, {{"out", out}});
}

FormatChoice choose_format(const QuantizeOptions& options) {
  FormatChoice choice = parse_choice(options.format, "--format");
  if (!options.v_format.empty()) {
    if (options.format.find(':') != std::string::npos || options.v_format.find(':') != std::string::npos) {
      throw UsageError("--v-format and a K:V --format both set the format of V: use one of them.");
    }
    const FormatChoice v = parse_choice(options.v_format, "--v-format");
    if (v.channels) {
      throw UsageError(
          fmt::format("--v-format is '{}', but only K has +chan: leave it out.", options.v_format));
    }
    choice.v = v.v;
    choice.rotate_v = v.rotate_v;
  }
  choice.rotate_k |= options.rotate_k;
  choice.rotate_v |= options.rotate_v;
  return choice;
}

void quantize(const QuantizeOptions& options, Terminal& terminal) {
  const FormatChoice choice = choose_format(options);
  const AxisOrder order = parse_axis_order(options.layout);
  check_page_size(options.page_size, "--page-size");
  check_files(options.in, options.out);
  const SafetensorsReader file(options.in);
  const std::vector<CapturedLayer> layers = find_layers(file, order, CapturedParts::kKv);
  std::vector<TensorDeclaration> tensors;
  std::map<std::string, std::string> metadata = {{"halftone_version", HALFTONE_VERSION}};
  const auto spec_of = [&](const CapturedLayer& layer) {
    return choice.spec(layer.kv_heads, layer.head_dim, layer.v_dim, options.page_size);
  };
  double bytes_in = 0, bytes_out = 0;
  for (const CapturedLayer& layer : layers) {
    declare_packed_layer(layer.label, spec_of(layer), layer.tokens, tensors, metadata);
    bytes_in += static_cast<double>(layer.k->bytes() + layer.v->bytes());
    bytes_out += static_cast<double>(layer.tokens) * bytes_per_token(spec_of(layer));
  }
  SafetensorsWriter writer(options.out, tensors, metadata);
  {
    Progress progress(terminal, static_cast<std::int64_t>(layers.size()));
    for (const CapturedLayer& layer : layers) {
      progress.step(layer.name());
      const auto [k, v] = load_keys_and_values(file, layer, order, layer.tokens);
      to_finite_floats(k, layer.k->name);
      to_finite_floats(v, layer.v->name);
      OwnedCache cache(spec_of(layer), 1, layer.tokens);
      cache.calibrate(k.view(), v.view());
      cache.append(0, k.view(), v.view());
      write_packed_layer(writer, cache);
    }
  }
  writer.commit();
  print(terminal.out, "Wrote {}: {} layer{} as {}, K and V {} -> {} ({:.2f}x smaller).\n",
        printable(options.out, 4096), layers.size(), layers.size() == 1 ? "" : "s",
        choice_name(choice.k, choice.rotate_k, choice.v, choice.rotate_v, choice.channels),
        human_bytes(bytes_in), human_bytes(bytes_out), bytes_in / bytes_out);
}

struct DequantizeOptions {
  std::string in, out;
  std::string dtype = "bf16";
};

DType parse_dtype(const std::string& text) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (dtype_name(dtype) == text) return dtype;
  }
  throw UsageError(fmt::format("--dtype is '{}', but must be bf16, f16 or f32: use bf16.", printable(text)));
}

void dequantize_file(const DequantizeOptions& options, Terminal& terminal) {
  const DType dtype = parse_dtype(options.dtype);
  check_files(options.in, options.out);
  const SafetensorsReader file(options.in);
  const std::vector<PackedLayer> layers = find_packed_layers(file);
  std::vector<TensorDeclaration> tensors;
  std::map<std::string, std::string> metadata = {{"halftone_version", HALFTONE_VERSION}};
  for (const PackedLayer& layer : layers) {
    const std::string prefix = layer.label.empty() ? "" : layer.label + ".";
    tensors.push_back({prefix + "k", dtype, {layer.tokens, layer.spec.kv_heads, layer.spec.head_dim}});
    tensors.push_back({prefix + "v", dtype, {layer.tokens, layer.spec.kv_heads, layer.spec.v_dim()}});
    metadata[prefix + "stored_as"] =
        choice_name(layer.spec.k_format, layer.spec.rotate_k, layer.spec.v_format, layer.spec.rotate_v,
                    layer.spec.has_channels());
  }
  SafetensorsWriter writer(options.out, tensors, metadata);
  {
    Progress progress(terminal, static_cast<std::int64_t>(layers.size()));
    for (const PackedLayer& layer : layers) {
      progress.step(layer.label);
      const OwnedCache cache = load_packed_layer(file, layer);
      const reference::Tensor k(dtype, {layer.tokens, layer.spec.kv_heads, layer.spec.head_dim});
      const reference::Tensor v(dtype, {layer.tokens, layer.spec.kv_heads, layer.spec.v_dim()});
      halftone::dequantize(cache.view(), k.view(), v.view());
      writer.write(std::as_bytes(k.bytes()));
      writer.write(std::as_bytes(v.bytes()));
    }
  }
  writer.commit();
  print(terminal.out, "Wrote {}: k and v of {} layer{} as {}.\n", printable(options.out, 4096), layers.size(),
        layers.size() == 1 ? "" : "s", dtype_name(dtype));
}

}  // namespace

void add_quantize(Command app, Terminal& terminal) {
  const Command command =
      app.add_subcommand("quantize", "Pack k and v of every layer into pages of a format");
  auto options = std::make_shared<QuantizeOptions>();
  command->footer(
      std::string("Input:\n") + std::string(naming_help()) +
      "q is not needed and not kept.\n\n"
      "Output, of each layer:\n"
      "  layers.<i>.pages    U8 [pages, page_bytes], the native page layout (docs/formats.md)\n"
      "  layers.<i>.lengths  I32 [1], live tokens\n"
      "  layers.<i>.k_scale, k_min, v_scale, v_min  F32, static scales where the format has them\n"
      "  layers.<i>.k_offset, k_channel_scale  F32 [kv_heads, head_dim], of K's channels, with +chan\n"
      "  metadata            format = halftone-cache-1 and <layer>.spec, the cache spec as JSON\n\n"
      "Examples:\n"
      "  halftone quantize capture.safetensors packed.safetensors --format int4-g32\n"
      "  halftone quantize capture.safetensors packed.safetensors --format int4-g32+rot --v-format "
      "int8-head\n");
  command->add_option("in", options->in, "Capture with k and v (.safetensors)")->type_name("")->required();
  command->add_option("out", options->out, "Packed cache to write; appears only when complete")
      ->type_name("")
      ->required();
  command->add_option("-f,--format", options->format, "Format of K and V, or K:V")
      ->type_name("FORMAT")
      ->capture_default_str();
  command->add_option("--v-format", options->v_format, "Format of V when it differs")->type_name("FORMAT");
  command->add_flag("--rotate-k", options->rotate_k, "Store K after a Hadamard rotation");
  command->add_flag("--rotate-v", options->rotate_v, "Store V after a Hadamard rotation");
  command->add_option("--page-size", options->page_size, "Tokens per page")->capture_default_str();
  command->add_option("--layout", options->layout, "Axes of the tensors: thd or htd")
      ->type_name("AXES")
      ->capture_default_str();
  command->callback([options, &terminal] { quantize(*options, terminal); });
}

void add_dequantize(Command app, Terminal& terminal) {
  const Command command = app.add_subcommand("dequantize", "Turn a packed cache back into k and v");
  auto options = std::make_shared<DequantizeOptions>();
  command->footer(
      "Writes layers.<i>.k and layers.<i>.v [tokens, heads, dim], rotations undone.\n\n"
      "Example:\n"
      "  halftone dequantize packed.safetensors kv.safetensors --dtype f32\n");
  command->add_option("in", options->in, "Packed cache from `halftone quantize`")->type_name("")->required();
  command->add_option("out", options->out, "File to write; appears only when complete")
      ->type_name("")
      ->required();
  command->add_option("--dtype", options->dtype, "bf16, f16 or f32")
      ->type_name("NAME")
      ->capture_default_str();
  command->callback([options, &terminal] { dequantize_file(*options, terminal); });
}

}  // namespace halftone::cli
