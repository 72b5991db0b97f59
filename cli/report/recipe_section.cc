#include <fmt/format.h>

#include "cli/report/page.h"
#include "cli/report/plots.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

constexpr std::size_t kUnfoldedLayers = 40;

/// The time of a decode step in all layers, or 0 when that of a layer's formats was not measured.
double step_us(const RecipeReport& recipe, const ReportExtras& extras) {
  double sum = 0;
  for (const auto& [number, layer] : recipe.recipe.layers) {
    const auto found = extras.step_us.find(layer.stored.choice.name);
    if (found == extras.step_us.end()) return 0;
    sum += found->second;
  }
  return sum;
}

std::string layer_rows(const RecipeReport& recipe, const ReportExtras& extras) {
  std::vector<std::string> headings = {"layer",          "K", "V", "bytes /<br>token", "vs<br>bf16",
                                       "output<br>error"};
  if (!extras.step_us.empty()) headings.emplace_back("step");
  std::string html = table_head(headings);
  for (std::size_t i = 0; i < recipe.numbers.size(); ++i) {
    const FormatChoice& c = recipe.recipe.layers.at(recipe.numbers[i]).stored.choice;
    const LayerResult& r = recipe.layers[i];
    html += "<tr>" + cell(fmt::format("{}", recipe.numbers[i]));
    html += cell(swatch(c) + html_escape(choice_name(c.k, c.rotate_k, c.k, c.rotate_k, c.channels)));
    html += cell(html_escape(choice_name(c.v, c.rotate_v, c.v, c.rotate_v)));
    html += cell(fmt::format("{:.0f}", r.bytes_per_token)) + cell(fmt::format("{:.2f}x", r.compression));
    html += cell(percent(r.output.relative));
    if (!extras.step_us.empty()) {
      const auto found = extras.step_us.find(c.name);
      html += cell(found == extras.step_us.end() ? "" : human_time(found->second));
    }
    html += "</tr>\n";
  }
  html += "</table></div>\n";
  if (recipe.numbers.size() <= kUnfoldedLayers) return html;
  return fmt::format("<details><summary>{} layers</summary>\n{}</details>\n", recipe.numbers.size(), html);
}

}  // namespace

std::string tile(const std::string& value, const std::string& what) {
  return fmt::format("<div class=\"tile\"><b>{}</b><span>{}</span></div>\n", html_escape(value),
                     html_escape(what));
}

std::string swatch(const FormatChoice& choice) {
  return fmt::format("<span class=\"swatch {}{}\"></span>", family(choice.k), choice.rotate_k ? "" : " full");
}

std::string table_head(const std::vector<std::string>& headings) {
  std::string html = "<div class=\"scroll\"><table>\n<tr>";
  for (const std::string& heading : headings) html += fmt::format("<th>{}</th>", heading);
  return html + "</tr>\n";
}

std::string cell(const std::string& html, std::string_view css) {
  return css.empty() ? fmt::format("<td>{}</td>", html) : fmt::format("<td class=\"{}\">{}</td>", css, html);
}

std::string recipe_section(const RecipeReport& recipe, const ReportExtras& extras) {
  std::string html =
      fmt::format("<h2>The recipe</h2>\n<div class=\"answer\"><p>{}</p></div>\n<div class=\"tiles\">\n",
                  html_escape(recipe.sentence));
  const double bytes = recipe.recipe.bytes_per_token();
  html += tile(fmt::format("{:.0f} bytes", bytes),
               fmt::format("per token in the recipe's {} layers", recipe.recipe.layers.size()));
  html += tile(human_bytes(1e6 * bytes), "for 1M tokens");
  if (extras.memory > 0) {
    html += tile(fmt::format("{} tokens", human_count(extras.memory / bytes)),
                 fmt::format("fit into {}", extras.memory_text));
  }
  html += tile(percent(recipe.error()), "output error, root mean square of the layers");
  if (const double us = step_us(recipe, extras); us > 0) {
    html += tile(human_time(us), "attention of a decode step, " + extras.step_text);
  }
  if (const auto found = extras.quality.find("recipe"); found != extras.quality.end()) {
    html += tile(short_number(found->second.kl), "KL, nats per token: " + extras.quality_text);
    html += tile(fmt::format("{:.3f}", found->second.perplexity),
                 fmt::format("perplexity; with the model's own cache {:.3f}", extras.exact_perplexity));
  }
  html += "</div>\n<figure>\n" + plot_recipe(recipe) +
          "<figcaption>Bytes of a token in every layer: K below, V above; over them the layer's output "
          "error.</figcaption>\n</figure>\n";
  return html + layer_rows(recipe, extras);
}

}  // namespace halftone::cli
