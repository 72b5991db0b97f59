// The page that `halftone eval --html` and `halftone recipe --html` write: no script, no external resource;
// plots are inline SVG.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cli/host/host.h"
#include "cli/report/extras.h"
#include "cli/report/page.h"
#include "cli/report/plots.h"
#include "cli/report/style.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

constexpr std::size_t kMaxHeatMaps = 10;
constexpr std::size_t kMaxChannelPlots = 8;
constexpr std::size_t kUnfoldedRows = 12;
constexpr std::size_t kMaxMetadata = 30;

/// Which layers a token's bytes are those of.
std::string layers_text(const EvalReport& report, const ReportExtras& extras) {
  const std::size_t captured = report.layers.size();
  if (extras.model_layers == static_cast<int>(captured)) {
    return captured == 1 ? "the captured layer" : fmt::format("the {} captured layers", captured);
  }
  return fmt::format("{} layers like the {} captured", extras.model_layers, captured);
}

std::string head(const EvalReport& report) {
  const CapturedLayer& shape = report.layers.front().shape;
  const CpuInfo cpu = cpu_info();
  const std::size_t slash = report.file.rfind('/');
  const std::string name =
      html_escape(printable(slash == std::string::npos ? report.file : report.file.substr(slash + 1)));
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>KV-cache formats on {0}</title>\n<style>{1}</style>\n</head>\n<body>\n<main>\n"
      "<h1>KV-cache formats on {0}</h1>\n"
      "<p class=\"sub\">{2} layer{3}, {4} tokens, {5} queries judged; {6} query heads over {7} KV heads, "
      "head_dim {8}. "
      "Measured with halftone {9} on {10} ({11}, {12}), {13}.</p>\n",
      name, kReportStyle, report.layers.size(), report.layers.size() == 1 ? "" : "s", shape.tokens,
      shape.queries, shape.q_heads, shape.kv_heads, shape.head_dim, HALFTONE_VERSION, html_escape(cpu.model),
      html_escape(cpu.simd), thread_count(cpu.threads), utc_now());
}

std::string answer(const EvalReport& report, const ReportExtras& extras) {
  std::string html =
      fmt::format("<div class=\"answer\"><p>{}</p></div>\n", html_escape(report.conclusion.sentence));
  if (report.conclusion.chosen < 0) return html;
  const FormatResult& f = report.formats[static_cast<std::size_t>(report.conclusion.chosen)];
  const double bytes = f.bytes_per_token * extras.model_layers;
  html += "<div class=\"tiles\">\n";
  html += tile(f.choice.name, "smallest format within the limit");
  html += tile(fmt::format("{:.2f}x", f.compression), "smaller than bf16, scales included");
  html += tile(percent(f.error_worst),
               fmt::format("output error, worst layer (limit {:g}%)", 100 * report.options.max_error));
  html += tile(fmt::format("{:.4f}", f.worst_cosine), "cosine of the worst single output row");
  html +=
      tile(fmt::format("{:.0f} bytes", bytes),
           fmt::format("per token in {}; bf16: {:.0f}", layers_text(report, extras), bytes * f.compression));
  html += tile(human_bytes(1e6 * bytes),
               fmt::format("for 1M tokens; bf16: {}", human_bytes(1e6 * bytes * f.compression)));
  if (extras.memory > 0) {
    html += tile(fmt::format("{} tokens", human_count(extras.memory / bytes)),
                 fmt::format("fit into {}; bf16: {}", extras.memory_text,
                             human_count(extras.memory / bytes / f.compression)));
  }
  return html + "</div>\n";
}

std::string how_to_read(const EvalReport& report) {
  return fmt::format(
      "<h2>How to read this page, and how to decide</h2>\n<ul>\n"
      "<li><b>Output error</b> is &#8214;O &minus; O<sub>exact</sub>&#8214; / "
      "&#8214;O<sub>exact</sub>&#8214; of causal "
      "attention over the stored cache, against double precision on the captured values. Rounding the output "
      "to bf16, as "
      "every engine does, already costs {}; a format well below that is free.</li>\n"
      "<li><b>Follow the line.</b> A format on it has no rival that is both smaller and more exact. Take the "
      "leftmost "
      "point under your limit; if a point just above it is much smaller, test that one on your task.</li>\n"
      "<li><b>Look at the heat maps before you trust an average.</b> One dark row is a layer to keep in a "
      "larger format; "
      "one dark column is a head that attends sharply. K and V may use different formats, and each layer its "
      "own.</li>\n"
      "<li><b>Look at the channels of K.</b> Where a few channels tower over the rest, one scale per token "
      "wastes its codes "
      "on them: smaller groups (g32) or a Hadamard rotation (+rot, exact in exact arithmetic) help.</li>\n"
      "<li><b>What it does not say.</b> Errors of one layer at a time on one text are a filter, not a "
      "verdict: confirm "
      "the choice with your own evaluation.</li>\n</ul>\n",
      percent(report.bf16_rounding));
}

/// What was measured elsewhere, of a format with this name; empty cells where nothing was.
std::string extra_cells(const ReportExtras& extras, const std::string& name, double bytes) {
  std::string html;
  if (extras.memory > 0) html += cell(human_count(extras.memory / (bytes * extras.model_layers)));
  if (!extras.step_us.empty()) {
    const auto found = extras.step_us.find(name);
    html += cell(found == extras.step_us.end() ? "" : human_time(found->second * extras.model_layers));
  }
  if (!extras.quality.empty()) {
    const auto found = extras.quality.find(name);
    html += cell(found == extras.quality.end() ? "" : short_number(found->second.kl));
    html += cell(found == extras.quality.end() ? "" : fmt::format("{:.3f}", found->second.perplexity));
  }
  return html;
}

std::string extra_notes(const EvalReport& report, const ReportExtras& extras) {
  std::string html;
  const auto note = [&](const std::string& text) {
    html += fmt::format("<p class=\"soft\">{}</p>\n", html_escape(text));
  };
  if (extras.memory > 0) {
    note(
        fmt::format("Tokens that fit: of all requests together, {} for the cache of {}, weights not counted.",
                    extras.memory_text, layers_text(report, extras)));
  }
  if (!extras.step_us.empty()) {
    note(fmt::format("Step: attention of one decode step in {}, {}; where empty, not measured.",
                     layers_text(report, extras), extras.step_text));
  }
  if (!extras.quality.empty()) {
    note(fmt::format("KL (nats per token) and perplexity: {}; with the model's own cache {:.3f}.",
                     extras.quality_text, extras.exact_perplexity));
  }
  return html;
}

std::string format_table(const EvalReport& report, const ReportExtras& extras) {
  std::vector<std::string> headings = {
      "format",        "bytes /<br>token",     "vs<br>bf16",      "K SNR<br>dB", "V SNR<br>dB",
      "error<br>mean", "error<br>worst layer", "worst<br>cosine", "LSE<br>error"};
  if (report.options.timed) headings.insert(headings.end(), {"prefill", "decode"});
  if (extras.memory > 0) headings.emplace_back("tokens<br>that fit");
  if (!extras.step_us.empty()) headings.emplace_back("step");
  if (!extras.quality.empty()) headings.insert(headings.end(), {"KL", "perplexity"});
  headings.emplace_back("");
  std::string html = table_head(headings);
  for (std::size_t i = 0; i < report.formats.size(); ++i) {
    const FormatResult& f = report.formats[i];
    const bool chosen = static_cast<int>(i) == report.conclusion.chosen;
    html += chosen ? "<tr class=\"chosen\">" : "<tr>";
    html += cell(swatch(f.choice) + html_escape(f.choice.name));
    html += cell(fmt::format("{:.0f}", f.bytes_per_token)) + cell(fmt::format("{:.2f}x", f.compression));
    html += cell(decibel(f.k_snr)) + cell(decibel(f.v_snr)) + cell(percent(f.error_mean));
    html += cell(percent(f.error_worst), f.error_worst <= report.options.max_error ? "within" : "");
    html += cell(fmt::format("{:.5f}", f.worst_cosine)) + cell(short_number(f.lse_error));
    if (report.options.timed) html += cell(human_time(f.prefill_us)) + cell(human_time(f.decode_us));
    html += extra_cells(extras, f.choice.name, f.bytes_per_token);
    html += cell(chosen ? "chosen" : f.pareto ? "on line" : "", "mark") + "</tr>\n";
  }
  html += "</table></div>\n";
  if (!report.skipped.empty()) {
    html += fmt::format("<p class=\"soft\">Left out, because they do not fit head_dim {}: {}.</p>\n",
                        report.layers.front().shape.head_dim, fmt::join(report.skipped, ", "));
  }
  return html + extra_notes(report, extras);
}

std::string layer_table(const EvalReport& report) {
  std::string html =
      table_head({"layer", "smallest format<br>within the limit", "bytes /<br>token", "output<br>error",
                  "largest / median<br>K channel", "bf16 rounding<br>of the output"});
  for (std::size_t l = 0; l < report.layers.size(); ++l) {
    const LayerReport& layer = report.layers[l];
    const int best = report.conclusion.per_layer[l];
    html += "<tr>" + cell(html_escape(printable(layer.shape.name())));
    if (best < 0) {
      html += cell("none") + cell("") + cell("");
    } else {
      const FormatResult& f = report.formats[static_cast<std::size_t>(best)];
      html += cell(swatch(f.choice) + html_escape(f.choice.name));
      html += cell(fmt::format("{:.0f}", f.layers[l].bytes_per_token)) +
              cell(percent(f.layers[l].output.relative));
    }
    html += cell(fmt::format("{:.1f}x", layer.k_channels.outlier_ratio)) +
            cell(percent(layer.bf16_rounding)) + "</tr>\n";
  }
  html += "</table></div>\n";
  if (report.layers.size() <= kUnfoldedRows) return html;
  return fmt::format("<details><summary>{} layers</summary>\n{}</details>\n", report.layers.size(), html);
}

/// What the file says about itself.
std::string about_capture(const EvalReport& report) {
  if (report.metadata.empty()) return "";
  std::string html = "<h2>About the capture</h2>\n<div class=\"scroll\"><table class=\"about\">\n";
  std::size_t rows = 0;
  for (const auto& [key, text] : report.metadata) {
    if (rows++ == kMaxMetadata) break;
    html += "<tr>" + cell(html_escape(printable(key))) + cell(html_escape(printable(text, 400))) + "</tr>\n";
  }
  return html + "</table></div>\n";
}

/// Formats worth a heat map: the Pareto set and the chosen one, without those that round like bf16.
std::vector<std::size_t> heat_formats(const EvalReport& report) {
  std::vector<std::size_t> formats;
  for (std::size_t i = 0; i < report.formats.size(); ++i) {
    const FormatResult& f = report.formats[i];
    const bool wanted = (f.pareto && f.error_worst > report.bf16_rounding / 4) ||
                        static_cast<int>(i) == report.conclusion.chosen;
    if (wanted && formats.size() < kMaxHeatMaps) formats.push_back(i);
  }
  if (formats.empty()) formats.push_back(report.formats.size() - 1);
  return formats;
}

std::string heat_maps(const EvalReport& report) {
  const std::vector<std::size_t> formats = heat_formats(report);
  const HeatScale scale = heat_scale(report, formats);
  std::string html = "<h2>Where the error is: layers and heads</h2>\n<figure>\n" + plot_heat_legend(scale);
  for (const std::size_t i : formats) {
    const FormatResult& f = report.formats[i];
    html +=
        fmt::format("<h3>{}{} <span class=\"soft\">{:.0f} bytes/token, worst layer {}</span></h3>\n",
                    swatch(f.choice), html_escape(f.choice.name), f.bytes_per_token, percent(f.error_worst));
    html += plot_heat_map(report, i, scale);
  }
  return html +
         "<figcaption>Rows are layers, columns query heads; one colour scale for all. Formats on the Pareto "
         "line, larger "
         "first.</figcaption>\n</figure>\n";
}

std::string channel_plots(const EvalReport& report) {
  std::vector<std::size_t> order(report.layers.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (order.size() > kMaxChannelPlots) {
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return report.layers[a].k_channels.outlier_ratio > report.layers[b].k_channels.outlier_ratio;
    });
    order.resize(kMaxChannelPlots);
    std::sort(order.begin(), order.end());
  }
  std::string html = "<h2>The outlier channels of K</h2>\n";
  for (const std::size_t l : order) html += "<figure>\n" + plot_channels(report.layers[l]) + "</figure>\n";
  return html + fmt::format(
                    "<p class=\"soft\">Largest |K| of each channel over all tokens: filled, as captured; "
                    "line, after the "
                    "block Hadamard rotation that +rot applies to K and Q.{}</p>\n",
                    order.size() < report.layers.size()
                        ? fmt::format(" The {} layers with the largest outliers of {}.", order.size(),
                                      report.layers.size())
                        : "");
}

std::string foot(const EvalReport& report) {
  return fmt::format(
      "<footer><p>SNR: 10 log<sub>10</sub> of signal over noise power of what the cache returns, smallest "
      "layer. Worst "
      "cosine: over all (token, head) output rows. inf: an output holds NaN or infinity. LSE error: largest "
      "absolute error of the log-sum-exp, in "
      "nats. Times: "
      "causal attention over all layers, summed; prefill is all {} queries in one call per layer, decode the "
      "last query "
      "alone; best of a few calls, fp32 output, caches warm. Static scales (fp8, int8-tensor, ...) were "
      "calibrated on each "
      "layer's own K and V. "
      "The bf16 row is fp32 attention over bf16 values: what storing bf16 costs.</p>\n"
      "<p>halftone {}{}, {}.</p></footer>\n</main>\n</body>\n</html>\n",
      report.layers.front().shape.queries, HALFTONE_VERSION,
      build_commit().empty() ? "" : " (" + build_commit() + ")", compiler_name());
}

}  // namespace

std::string to_html(const EvalReport& report, const ReportExtras& extras) {
  const RecipeReport* recipe = extras.recipe ? &*extras.recipe : nullptr;
  std::string html = head(report);
  if (recipe != nullptr) {
    html += recipe_section(*recipe, extras);
    html += "<h2>One format for all layers</h2>\n";
  }
  html += answer(report, extras);
  html += "<h2>Error against size</h2>\n<figure>\n" + plot_error_against_bytes(report, recipe) +
          "<figcaption>Each point is a format; left is smaller, down is more exact (logarithmic). The line "
          "joins the formats "
          "that nothing beats in both. Triangles lie below the plot. Hover over a point for its "
          "figures.</figcaption>\n</figure>\n";
  html += how_to_read(report);
  html += "<h2>All formats</h2>\n" + format_table(report, extras);
  html += "<h2>Layer by layer</h2>\n" + layer_table(report);
  html += heat_maps(report);
  html += channel_plots(report);
  html += about_capture(report);
  html += foot(report);
  return html;
}

}  // namespace halftone::cli
