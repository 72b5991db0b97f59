// `halftone eval`: options and the table on the terminal.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <omp.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

#include "cli/commands/command.h"
#include "cli/eval/latent.h"
#include "cli/eval/options.h"
#include "cli/files/outputs.h"
#include "cli/host/host.h"
#include "cli/options/problem.h"
#include "cli/recipe/check.h"
#include "cli/report/extras.h"
#include "cli/terminal/table.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

struct EvalCommandLine : EvalLine {
  std::string arithmetic = "16-bit";
  std::string json, html;
  bool per_layer = false, latent = false;
  ExtraOptions extras;
};

/// What one line of the table says, for all layers together or for one.
struct Line {
  double bytes, compression, k_snr, v_snr, error, cosine, lse, prefill_us, decode_us;
};

std::vector<std::string> cells(const Line& line) {
  return {fmt::format("{:.0f}", line.bytes),
          fmt::format("{:.2f}x", line.compression),
          decibel(line.k_snr),
          decibel(line.v_snr),
          percent(line.error),
          fmt::format("{:.5f}", line.cosine),
          short_number(line.lse),
          fmt::format("{:.1f}", line.prefill_us / 1e3),
          fmt::format("{:.0f}", line.decode_us)};
}

void add_measures(Table& table) {
  table.column("bytes/\ntoken");
  table.column("vs\nbf16");
  table.column("K SNR\ndB");
  table.column("V SNR\ndB");
  table.column("output\nerror");
  table.column("worst\ncosine");
  table.column("LSE\nerror");
  table.column("prefill\nms");
  table.column("decode\nus");
}

void print_summary(Terminal& terminal, const EvalReport& report) {
  Table table;
  table.column("format", Table::Align::kLeft);
  add_measures(table);
  table.column("", Table::Align::kLeft);
  for (std::size_t i = 0; i < report.formats.size(); ++i) {
    const FormatResult& f = report.formats[i];
    std::vector<std::string> row = cells({f.bytes_per_token, f.compression, f.k_snr, f.v_snr, f.error_worst,
                                          f.worst_cosine, f.lse_error, f.prefill_us, f.decode_us});
    row.insert(row.begin(), f.choice.name);
    const bool chosen = static_cast<int>(i) == report.conclusion.chosen;
    row.push_back(chosen ? "<- smallest within the limit" : f.pareto ? "*" : "");
    table.row(std::move(row));
    if (chosen) table.emphasise();
  }
  table.print(terminal);
}

void print_layers(Terminal& terminal, const EvalReport& report) {
  Table table;
  table.column("layer", Table::Align::kLeft);
  table.column("format", Table::Align::kLeft);
  add_measures(table);
  for (std::size_t l = 0; l < report.layers.size(); ++l) {
    for (const FormatResult& f : report.formats) {
      const LayerResult& r = f.layers[l];
      std::vector<std::string> row =
          cells({r.bytes_per_token, r.compression, r.k_snr, r.v_snr, r.output.relative, r.output.worst_cosine,
                 r.lse_error, r.prefill_us, r.decode_us});
      row.insert(row.begin(), f.choice.name);
      row.insert(row.begin(), printable(report.layers[l].shape.name(), 24));
      table.row(std::move(row));
    }
  }
  terminal.out << '\n';
  table.print(terminal);
}

/// Only what the caller chose.
std::string arithmetic_text(const EvalReport& report) {
  if (report.options.arithmetic == Arithmetic::k16Bit) return {};
  return fmt::format(", arithmetic {}", arithmetic_name(report.options.arithmetic));
}

void print_text(Terminal& terminal, const EvalReport& report, const EvalCommandLine& line) {
  const CapturedLayer& shape = report.layers.front().shape;
  print(terminal.out,
        "{}: {} layer{}, {} tokens, {} queries, {} query heads over {} KV heads, head_dim {}\n\n",
        printable(report.file), report.layers.size(), report.layers.size() == 1 ? "" : "s", shape.tokens,
        shape.queries, shape.q_heads, shape.kv_heads, shape.head_dim);
  print_summary(terminal, report);
  if (line.per_layer) print_layers(terminal, report);
  print(terminal.out,
        "\nBytes: K and V of one token and layer. Errors: against double precision on the captured values; "
        "output\n"
        "error is relative (Frobenius), the worst layer counts; rounding the output to bf16 alone costs {}.\n"
        "Times: causal attention of all layers on this CPU, {}, fp32 output{}. * nothing is smaller and\n"
        "more exact.\n\n",
        percent(report.bf16_rounding), thread_count(omp_get_max_threads()), arithmetic_text(report));
  const bool broken = std::any_of(report.formats.begin(), report.formats.end(),
                                  [](const FormatResult& f) { return !std::isfinite(f.error_worst); });
  if (broken) print(terminal.out, "inf: an output holds NaN or infinity.\n\n");
  if (!report.skipped.empty()) {
    print(terminal.out, "Left out, because they do not fit head_dim {}: {}.\n\n", shape.head_dim,
          fmt::join(report.skipped, ", "));
  }
  print(terminal.out, "{}\n", terminal.bold(report.conclusion.sentence));
  if (!line.html.empty() && line.html != "-") print(terminal.out, "Wrote {}.\n", printable(line.html, 4096));
}

void run_eval(EvalCommandLine& line, Terminal& terminal) {
  finish_capture_options(line);
  line.options.arithmetic = parse_arithmetic_option(line.arithmetic);
  check_page_size(line.options.page_size, "--page-size");
  if (line.json == "-" && line.html == "-")
    throw UsageError("--json and --html are both -: name a file for one.");
  check_outputs({"the input", line.file}, {{"--json", line.json}, {"--html", line.html}});
  const std::vector<CapturedLayer> layers = layers_of(line.file, line.options);
  ReportExtras extras = read_extras(line.extras, layers);
  const bool has_recipe = !line.extras.recipe.empty();
  if (has_recipe) extras.recipe = read_recipe(line.extras.recipe, layers);
  const EvalReport report = evaluate(line.file, line.options, terminal);
  if (has_recipe) measure_recipe(*extras.recipe, line.file, line.options, layers, terminal);
  if (!line.json.empty()) {
    nlohmann::ordered_json json = to_json(report);
    if (has_recipe) json["recipe"] = to_json(*extras.recipe);
    write_output(terminal, line.json,
                 json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  if (!line.html.empty()) write_output(terminal, line.html, to_html(report, extras));
  if (line.json == "-" || line.html == "-") return;
  print_text(terminal, report, line);
  if (has_recipe) {
    print(terminal.out, "\n");
    print_recipe(terminal, *extras.recipe);
  }
}

/// Refuses options that say nothing about latents, and formats that no latent has.
void check_latent_line(Command command, const EvalCommandLine& line) {
  const auto refuse = [&](std::initializer_list<const char*> names, const char* why) {
    for (const char* name : names) {
      const Option option = command.get_option(name);
      if (option.count() == 0) continue;
      const std::string value =
          option.results().empty() ? "" : " is '" + printable(option.results()[0]) + "'";
      throw UsageError(fmt::format("{}{}, but {}: leave out one of the two.", name, value, why));
    }
  };
  refuse({"--html", "--per-layer", "--max-error", "--arithmetic", "--recipe", "--memory", "--model-layers",
          "--bench", "--quality"},
         "--latent prints one table, in 16-bit arithmetic, and --json");
  if (line.file.empty()) refuse({"--layers", "--layout"}, "--latent without a file generates its layers");
  for (const FormatChoice& f : line.options.formats) check_latent_format(f, "--formats");
}

void run_latent(EvalCommandLine& line, Command command, Terminal& terminal) {
  finish_capture_options(line);
  check_latent_line(command, line);
  check_page_size(line.options.page_size, "--page-size");
  if (line.file.empty() && command.get_option("--max-queries")->count() == 0)
    line.options.max_queries = kLatentQueries;
  check_outputs({"the input", line.file}, {{"--json", line.json}});
  const LatentReport report = evaluate_latents(line.file, line.options, terminal);
  if (!line.json.empty()) {
    write_output(terminal, line.json,
                 to_json(report).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  if (line.json != "-") print_latents(terminal, report);
}

constexpr const char* kFooterExamples =
    "\nWhat it does:\n"
    "  For every format: quantise k and v into a paged cache, run causal attention over it, and compare the "
    "output\n"
    "  with attention in double precision on the captured values. Static scales are calibrated per layer.\n\n"
    "How to read it:\n"
    "  output error   ||O - O_exact|| / ||O_exact||; 0.02 is 2%. The note below the table says what rounding "
    "to bf16 costs.\n"
    "                 inf: an output holds NaN or infinity; in JSON the text \"inf\"\n"
    "  worst cosine   the direction of the worst single output row; below 0.99 some token is visibly wrong\n"
    "  LSE error      shift of the log-sum-exp, i.e. of attention weights between splits; nats\n"
    "  A FORMAT is a name from `halftone formats`, K:V when they differ, with +rot for a Hadamard "
    "rotation.\n\n"
    "Latents (--latent):\n"
    "  Formats of latent (MLA) caches, on layers.<i>.q and layers.<i>.k [tokens, 1, dim] of the file: the "
    "latent, then\n"
    "  its rotary dims. V is the latent; of 512 or 256 dims in all it is the whole. Without a file q and k "
    "are\n"
    "  generated: N(0, 1), and the same with outlier channels, one in 32 offset by +-10 to 40.\n\n"
    "Examples:\n"
    "  halftone eval capture.safetensors\n"
    "  halftone eval capture.safetensors --html report.html --max-error 0.05\n"
    "  halftone eval capture.safetensors --formats bf16,int8-head,int4-g32+rot:int8-head --per-layer\n"
    "  halftone eval capture.safetensors --json - | jq '.formats[] | [.name, .error_worst]'\n"
    "  halftone eval --latent\n";

}  // namespace

void add_eval(Command app, Terminal& terminal) {
  const Command command = app.add_subcommand("eval", "Measure what each format costs on captured q, k and v");
  auto line = std::make_shared<EvalCommandLine>();
  EvalOptions& options = line->options;
  command->footer(std::string("Input:\n") + std::string(naming_help()) + kFooterExamples);
  add_capture_options(command, *line, "Comma-separated formats, K:V, +rot and +chan allowed (default: all)");
  command->add_option("--max-error", options.max_error, "Output error that the conclusion tolerates")
      ->check(positive())
      ->capture_default_str();
  command->add_option("--html", line->html, "Write a self-contained page with plots (- for stdout)")
      ->type_name("FILE");
  command->add_option("--json", line->json, "Write all figures as JSON (- for stdout)")->type_name("FILE");
  command->get_option("file")->required(false);  // of --latent
  command->add_flag("--latent", line->latent,
                    "Measure formats of latent (MLA) caches, without a file on generated latents");
  command->add_flag("--per-layer", line->per_layer, "Print a table of every layer as well");
  command->add_option("--layers", options.layers, "Use these layers only, counted from 0: 0,3,7")
      ->type_name("N,...")
      ->delimiter(',');
  add_arithmetic_option(command, line->arithmetic);
  command->add_option("--page-size", options.page_size, "Tokens per page")->capture_default_str();
  command->add_option("--recipe", line->extras.recipe, "Measure a recipe of `halftone recipe`, too")
      ->type_name("FILE");
  add_extra_options(command, line->extras);
  command->callback([line, command, &terminal] {
    if (line->latent) return run_latent(*line, command, terminal);
    if (line->file.empty())
      throw UsageError("file is missing: name a capture, or use --latent; see `halftone eval --help`.");
    run_eval(*line, terminal);
  });
}

}  // namespace halftone::cli
