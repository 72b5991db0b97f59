// `halftone formats`: every named format and what it costs.
#include <fmt/format.h>

#include "cli/commands/command.h"
#include "cli/options/format_choice.h"
#include "cli/terminal/table.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"
#include "nlohmann/json.hpp"

namespace halftone::cli {
namespace {

struct FormatsOptions {
  int head_dim = 128;
  int kv_heads = 8;
  bool json = false;
};

void run_formats(Terminal& terminal, const FormatsOptions& options) {
  page_layout(
      parse_choice("bf16", "bf16").spec(options.kv_heads, options.head_dim, 0, 64));  // fits all or none
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  Table table;
  table.column("format", Table::Align::kLeft);
  table.column("bytes\nper token");
  table.column("bits\nper value");
  table.column("vs\nbf16");
  table.column("scales", Table::Align::kLeft);
  table.column("description", Table::Align::kLeft);
  const double values = 2.0 * options.kv_heads * options.head_dim;
  for (const NamedFormat& named : named_formats()) {
    FormatChoice choice;
    choice.k = choice.v = named.format;
    double bytes = 0;
    try {
      bytes = bytes_per_token(choice.spec(options.kv_heads, options.head_dim, 0, 64));
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kInternal) throw;
      table.row({std::string(named.name), "-", "-", "-", "-", error.what()});
      continue;
    }
    const KvFormat& f = named.format;
    const std::string scales = !f.quantised()     ? "none"
                               : f.static_scale() ? "static"
                                                  : fmt::format("{}{}", dtype_name(f.scale_dtype),
                                                                f.asymmetric ? " scale, min" : " scale");
    table.row({std::string(named.name), fmt::format("{:.0f}", bytes),
               fmt::format("{:.2f}", bytes * 8 / values), fmt::format("{:.2f}x", values * 2 / bytes), scales,
               std::string(named.description)});
    rows.push_back({{"name", named.name},
                    {"bytes_per_token", bytes},
                    {"bits_per_value", bytes * 8 / values},
                    {"compression", values * 2 / bytes},
                    {"asymmetric", f.asymmetric},
                    {"static_scale", f.static_scale()},
                    {"description", named.description}});
  }
  if (options.json) {
    const nlohmann::ordered_json json = {
        {"head_dim", options.head_dim}, {"kv_heads", options.kv_heads}, {"formats", rows}};
    terminal.out << json.dump(2) << '\n';
    return;
  }
  print(terminal.out, "Bytes per token and layer: K and V, {} KV heads, head_dim {}, scales included.\n\n",
        options.kv_heads, options.head_dim);
  table.print(terminal);
  print(
      terminal.out,
      "\nK and V may differ (--formats int8-head:int4-g32); +rot stores K or V after a Hadamard rotation.\n"
      "+chan stores K less an offset and divided by a scale per channel, calibrated on a capture.\n"
      "Other combinations: {{fp8,int8,int4}}-{{tensor,static-head,token,token-head,g32,g64,g128}}[-sym|-asym]"
      "[-f16|-f32].\n"
      "Static scales, one set for the whole cache: fp8, tensor, static-head; append computes those of the "
      "others.\n");
}

}  // namespace

void add_formats(Command app, Terminal& terminal) {
  const Command command = app.add_subcommand("formats", "List the KV-cache formats and what they cost");
  auto options = std::make_shared<FormatsOptions>();
  command->add_option("--head-dim", options->head_dim, "Head dimension")->capture_default_str();
  command->add_option("--kv-heads", options->kv_heads, "KV heads of a layer")
      ->check(between(1, 65536))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print JSON instead of a table");
  command->callback([options, &terminal] { run_formats(terminal, *options); });
}

}  // namespace halftone::cli
