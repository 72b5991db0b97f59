#include <fmt/format.h>

#include <algorithm>

#include "cli/report/plots.h"
#include "cli/report/svg.h"
#include "cli/terminal/text.h"

namespace halftone::cli {

std::string plot_recipe(const RecipeReport& recipe) {
  constexpr double kWidth = 900, kHeight = 230;
  const Box frame{56, 24, kWidth - 66, kHeight - 62};
  double most = 0;
  for (const LayerResult& layer : recipe.layers) most = std::max(most, layer.bytes_per_token);
  const Axis y(0, most * 1.15, frame.y + frame.height, frame.y);
  Svg svg(kWidth, kHeight, "Bytes per token of every layer of the recipe");
  for (const double tick : y.ticks(4)) {
    svg.line({frame.x, y(tick)}, {frame.x + frame.width, y(tick)}, "grid");
    svg.text({frame.x - 8, y(tick) + 4}, fmt::format("{:g}", tick), "tick", "end");
  }
  const double step = frame.width / static_cast<double>(recipe.layers.size());
  const double width = std::min(64.0, step * 0.8);
  const std::size_t stride = step < 14 ? 8 : step < 26 ? 4 : 1;
  for (std::size_t i = 0; i < recipe.layers.size(); ++i) {
    const RecipeLayer& layer = recipe.recipe.layers.at(recipe.numbers[i]);
    const FormatChoice& choice = layer.stored.choice;
    const PageLayout layout = page_layout(layer.spec());
    const double k_bytes =
        static_cast<double>((layout.k_data_bytes + layout.k_param_bytes) * layer.kv_heads) / kTileTokens;
    const double total = recipe.layers[i].bytes_per_token;
    const double left = frame.x + step * (static_cast<double>(i) + 0.5) - width / 2;
    const std::string tooltip = fmt::format("layer {}: {}, {:.0f} bytes/token, error {}", recipe.numbers[i],
                                            choice.name, total, percent(recipe.layers[i].output.relative));
    svg.rect({left, y(k_bytes), width, y(0) - y(k_bytes)}, fmt::format("bar {}", family(choice.k)), "",
             tooltip);
    svg.rect({left, y(total), width, y(k_bytes) - y(total)}, fmt::format("bar top {}", family(choice.v)), "",
             tooltip);
    const double middle = left + width / 2;
    if (step >= 44)
      svg.text({middle, y(total) - 6}, percent(recipe.layers[i].output.relative), "tick", "middle");
    if (i % stride == 0) {
      svg.text({middle, frame.y + frame.height + 17}, fmt::format("{}", recipe.numbers[i]), "tick", "middle");
    }
  }
  svg.line({frame.x, y(0)}, {frame.x + frame.width, y(0)}, "axis");
  svg.text({frame.x - 40, 14}, "bytes per token", "label");
  svg.text({frame.x + frame.width / 2, kHeight - 6}, "layer", "label", "middle");
  return svg.str();
}

}  // namespace halftone::cli
