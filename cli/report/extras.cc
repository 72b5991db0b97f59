#include "cli/report/extras.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <tuple>

#include "cli/host/host.h"
#include "cli/options/validators.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

using Document = nlohmann::json;

[[noreturn]] void refuse(const char* option, const std::string& path, const std::string& sentence) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} '{}': {}", option, printable(path, 4096), sentence));
}

Document read_json(const char* option, const std::string& path, const char* maker) {
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file) refuse(option, path, "it cannot be read: name a file that is there.");
  Document json = Document::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("rows") || !json["rows"].is_array()) {
    refuse(option, path, fmt::format("it is no JSON object with rows: name a file that `{}` wrote.", maker));
  }
  return json;
}

double number(const Document& row, const char* name) {
  return row.contains(name) && row[name].is_number() ? row[name].get<double>() : std::nan("");
}

std::string text(const Document& row, const char* name) {
  return row.contains(name) && row[name].is_string() ? row[name].get<std::string>() : "";
}

bool flag(const Document& row, const char* name) { return row.contains(name) && row[name] == true; }

/// "int4-g32+rot:int8-head" of a row of `halftone bench --json`.
std::string format_of(const Document& row) {
  const std::string k = text(row, "format_k") + (flag(row, "rotate_k") ? "+rot" : "");
  const std::string v = text(row, "format_v") + (flag(row, "rotate_v") ? "+rot" : "");
  return k == v ? k : k + ":" + v;
}

/// Decode of single queries at the capture's geometry. Of several shapes that with most formats counts, of
/// these the one with most keys.
void read_bench(const std::string& path, const CapturedLayer& shape, ReportExtras& extras) {
  const Document json = read_json("--bench", path, "halftone bench --json");
  std::map<std::pair<double, double>, std::map<std::string, double>> cases;
  for (const Document& row : json["rows"]) {
    const bool like = number(row, "head_dim") == shape.head_dim &&
                      number(row, "kv_heads") == shape.kv_heads && number(row, "q_heads") == shape.q_heads &&
                      number(row, "q_len") == 1;
    if (text(row, "suite") == "decode" && like && std::isfinite(number(row, "us")) &&
        !row.contains("lengths")) {
      cases[{number(row, "batch"), number(row, "context")}].emplace(format_of(row), number(row, "us"));
    }
  }
  if (cases.empty()) {
    refuse(
        "--bench", path,
        fmt::format("it has no decode of one query with {} query heads, {} KV heads and head_dim {}, as the "
                    "capture has: run `halftone bench --suite decode --q-heads {} --kv-heads {} --head-dim "
                    "{} --json {}`.",
                    shape.q_heads, shape.kv_heads, shape.head_dim, shape.q_heads, shape.kv_heads,
                    shape.head_dim, printable(path, 4096)));
  }
  const auto best = std::max_element(cases.begin(), cases.end(), [](const auto& a, const auto& b) {
    return std::tuple(a.second.size(), a.first.first * a.first.second) <
           std::tuple(b.second.size(), b.first.first * b.first.second);
  });
  extras.step_us = best->second;
  const Document device = json.value("device", Document::object());
  const std::string name = text(device, "name");
  const std::string where = name.empty() ? text(device, "model") : name;
  extras.step_text =
      fmt::format("{:g} request{} of {:g} keys{}", best->first.first, best->first.first == 1 ? "" : "s",
                  best->first.second, where.empty() ? "" : " on " + where);
}

void read_quality(const std::string& path, ReportExtras& extras) {
  const Document json = read_json("--quality", path, "python -m halftone.recipe --json");
  for (const Document& row : json["rows"]) {
    const Quality quality{number(row, "kl"), number(row, "perplexity")};
    if (text(row, "name").empty() || !std::isfinite(quality.kl) || !std::isfinite(quality.perplexity)) {
      refuse("--quality", path, "a row lacks name, kl or perplexity: measure again.");
    }
    extras.quality[text(row, "name")] = quality;
  }
  extras.exact_perplexity = number(json, "perplexity");
  extras.quality_text =
      fmt::format("{}, {:g} tokens of {}", text(json, "model"), number(json, "tokens"), text(json, "text"));
}

}  // namespace

void add_extra_options(Command command, ExtraOptions& options) {
  command
      .add_option(
          "--memory", options.memory,
          "Memory for the cache, as 80GB or 24GiB: the page says how many tokens fit (default: the GPU's)")
      ->type_name("SIZE");
  command
      .add_option("--model-layers", options.model_layers,
                  "Layers of the model, if the capture has only some of them")
      ->check(between(1, 65536));
  command.add_option("--bench", options.bench, "Times for the page, of `halftone bench --json`")
      ->type_name("FILE");
  command
      .add_option("--quality", options.quality,
                  "KL and perplexity for the page, of `python -m halftone.recipe`")
      ->type_name("FILE");
}

double parse_memory(const std::string& text, const std::string& option) {
  static const std::map<std::string, double> units = {
      {"", 1},         {"B", 1},        {"K", 1e3},      {"KB", 1e3},    {"M", 1e6},
      {"MB", 1e6},     {"G", 1e9},      {"GB", 1e9},     {"T", 1e12},    {"TB", 1e12},
      {"KiB", 1024.0}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  const std::size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const auto unit = units.find(text.substr(end));
  double value = 0;
  const bool read = read_number(text.substr(0, end), value);
  if (!read || unit == units.end() || !(value > 0)) {
    throw UsageError(fmt::format("{} is '{}', but must be a size above 0: write it as 80GB or 24GiB.", option,
                                 printable(text)));
  }
  return value * unit->second;
}

ReportExtras read_extras(const ExtraOptions& options, const std::vector<CapturedLayer>& layers) {
  ReportExtras extras;
  const int captured = static_cast<int>(layers.size());
  extras.model_layers = options.model_layers == 0 ? captured : options.model_layers;
  if (extras.model_layers < captured) {
    throw UsageError(fmt::format("--model-layers is {}, but the capture has {}: use {} or more.",
                                 extras.model_layers, captured, captured));
  }
  if (!options.memory.empty()) {
    extras.memory = parse_memory(options.memory, "--memory");
    extras.memory_text = options.memory;
  } else if (const GpuInfo gpu = gpu_info(); !gpu.devices.empty()) {
    extras.memory = static_cast<double>(gpu.devices.front().memory);
    extras.memory_text = fmt::format("{}, {}", human_bytes(extras.memory), gpu.devices.front().name);
  }
  if (!options.bench.empty()) read_bench(options.bench, layers.front(), extras);
  if (!options.quality.empty()) read_quality(options.quality, extras);
  return extras;
}

}  // namespace halftone::cli
