#include "cli/report/plots.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "cli/report/svg.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

constexpr double kWidth = 900;
constexpr double kDot = 5.5;  // radius of a mark
constexpr int kNamesOfLabel = 2;
constexpr double kHalo = 10;  // radius of the ring around the chosen one

// Light to dark; readable on light and dark pages.
constexpr std::array<std::array<int, 3>, 6> kHeatColours = {
    {{255, 247, 209}, {254, 217, 118}, {253, 160, 66}, {240, 89, 41}, {189, 18, 38}, {94, 0, 33}}};

struct HeatColour {
  std::string fill;
  bool dark = false;
};

HeatColour heat_colour(const HeatScale& scale, double error) {
  const double share =
      error <= scale.low ? 0 : std::log(error / scale.low) / std::log(scale.high / scale.low);
  const double at = std::clamp(share, 0.0, 1.0) * (kHeatColours.size() - 1);
  const auto i = std::min(static_cast<std::size_t>(at), kHeatColours.size() - 2);
  std::array<int, 3> c{};
  for (std::size_t j = 0; j < 3; ++j) {
    c[j] = static_cast<int>(std::lround(
        kHeatColours[i][j] + (at - static_cast<double>(i)) * (kHeatColours[i + 1][j] - kHeatColours[i][j])));
  }
  return {fmt::format("#{:02x}{:02x}{:02x}", c[0], c[1], c[2]), at > 2.6};
}

std::string format_tooltip(const FormatResult& f) {
  return fmt::format("{}: {:.0f} bytes/token ({:.2f}x), error {} worst layer, {} mean", f.choice.name,
                     f.bytes_per_token, f.compression, percent(f.error_worst), percent(f.error_mean));
}

/// Ticks at round compression ratios: sizes are compared as ratios, so the axis is logarithmic.
void draw_error_axes(Svg& svg, const Box& frame, const Axis& x, const Axis& y, double uncompressed) {
  const double bottom = frame.y + frame.height, right = frame.x + frame.width;
  for (const double tick : y.ticks(12)) {
    svg.line({frame.x, y(tick)}, {right, y(tick)}, "grid");
    svg.text({frame.x - 8, y(tick) + 4}, fmt::format("{:g}%", 100 * tick), "tick", "end");
  }
  double last = right + 100;
  for (const double ratio : {0.5, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0}) {
    const double at = x(uncompressed / ratio);
    if (at < frame.x || at > right || last - at < 60) continue;
    last = at;
    svg.line({at, bottom}, {at, bottom + 5}, "axis");
    svg.text({at, bottom + 19}, fmt::format("{:.0f}", uncompressed / ratio), "tick", "middle");
    svg.text({at, bottom + 34}, fmt::format("{:g}x", ratio), "tick", "middle");
  }
  svg.line({frame.x, bottom}, {right, bottom}, "axis");
  svg.text({(frame.x + right) / 2, bottom + 56},
           "bytes per token and layer (K and V, all KV heads, scales included); times smaller than bf16",
           "label", "middle");
  svg.text({frame.x - 48, frame.y - 16}, "output error, worst layer", "label", "start");
}

/// A level with its label: above it at the right end, or below it at the left end, where no small format is
/// so exact that its point would be in the way.
void draw_limit(Svg& svg, const Box& frame, double y, const std::string& label, const char* css, bool above) {
  svg.line({frame.x, y}, {frame.x + frame.width, y}, css);
  if (above) {
    svg.text({frame.x + frame.width, y - 6}, label, "note", "end");
  } else {
    svg.text({frame.x + 4, y + 15}, label, "note");
  }
}

/// Points of the step-free Pareto line, by falling bytes.
std::vector<Point> pareto_line(const EvalReport& report, const Axis& x, const std::vector<Point>& at) {
  std::vector<std::pair<double, Point>> points;
  for (std::size_t i = 0; i < report.formats.size(); ++i) {
    if (report.formats[i].pareto) points.emplace_back(x(report.formats[i].bytes_per_token), at[i]);
  }
  std::stable_sort(points.begin(), points.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Point> line;
  line.reserve(points.size());
  for (const auto& p : points) line.push_back(p.second);
  return line;
}

/// One label; formats at one place share it.
struct Label {
  Point at;
  std::string text;
  bool pareto = false, chosen = false;
  int names = 1;
};

std::vector<Label> label_points(const EvalReport& report, const std::vector<Point>& at, double floor) {
  std::vector<Label> labels;
  for (std::size_t i = 0; i < report.formats.size(); ++i) {
    const FormatResult& f = report.formats[i];
    const bool chosen = static_cast<int>(i) == report.conclusion.chosen;
    const bool outside = f.error_worst < floor || !std::isfinite(f.error_worst);
    const std::string name =
        outside ? fmt::format("{} ({})", f.choice.name, percent(f.error_worst)) : f.choice.name;
    const auto same = std::find_if(labels.begin(), labels.end(), [&](const Label& l) {
      return std::fabs(l.at.x - at[i].x) < 3 && std::fabs(l.at.y - at[i].y) < 3;
    });
    if (same == labels.end()) {
      labels.push_back({at[i], name, f.pareto, chosen, 1});
    } else {
      if (same->names++ < kNamesOfLabel) same->text += ", " + name;
      same->pareto |= f.pareto;
      same->chosen |= chosen;
    }
  }
  for (Label& label : labels) {
    if (label.names > kNamesOfLabel) label.text += fmt::format(", {} more", label.names - kNamesOfLabel);
  }
  // These choose their places first.
  std::stable_sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) {
    return std::pair(a.chosen, a.pareto) > std::pair(b.chosen, b.pareto);
  });
  return labels;
}

void draw_labels(Svg& svg, const std::vector<Label>& labels, const Box& frame,
                 const std::vector<Box>& obstacles) {
  std::vector<Anchor> anchors;
  for (const Label& label : labels) {
    const bool bold = label.pareto || label.chosen;
    anchors.push_back(
        {label.at, label.chosen ? kHalo : kDot + 1, text_width(label.text, bold ? 13 : 12) + 4});
  }
  const std::vector<Box> boxes = place_labels(anchors, 15, frame, obstacles);
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const Box& box = boxes[i];
    const Point at = labels[i].at, end = nearest_point(box, at);
    if (std::hypot(end.x - at.x, end.y - at.y) > anchors[i].radius + kLeaderGap) svg.line(at, end, "leader");
    const bool right = box.x > at.x, left = box.x + box.width < at.x;
    const double x = right ? box.x + 2 : left ? box.x + box.width - 2 : box.x + box.width / 2;
    svg.text({x, box.y + 11.5}, labels[i].text,
             labels[i].chosen   ? "name chosen"
             : labels[i].pareto ? "name strong"
                                : "name",
             right  ? "start"
             : left ? "end"
                    : "middle");
  }
}

void draw_legend(Svg& svg, Point at) {
  struct Item {
    const char* css;
    const char* text;
  };
  double x = at.x;
  for (const Item& item : {Item{"dot f16", "16-bit"}, Item{"dot fp8", "fp8"}, Item{"dot int8", "int8"},
                           Item{"dot int4", "int4"}, Item{"dot ring int4", "+rot (rotated)"}}) {
    svg.circle({x, at.y - 4}, 5, item.css);
    svg.text({x + 10, at.y}, item.text, "note");
    x += 26 + text_width(item.text, 12);
  }
}

}  // namespace

std::string_view family(const KvFormat& format) {
  switch (format.dtype) {
    case DType::kFloat8E4M3:
      return "fp8";
    case DType::kInt8:
      return "int8";
    case DType::kInt4:
      return "int4";
    default:
      return "f16";
  }
}

std::string plot_error_against_bytes(const EvalReport& report, const RecipeReport* recipe) {
  const Box frame{70, 34, kWidth - 90, 410};
  double bytes_low = 1e30, bytes_high = 0, error_high = report.options.max_error;
  for (const FormatResult& f : report.formats) {
    bytes_low = std::min(bytes_low, f.bytes_per_token);
    bytes_high = std::max(bytes_high, f.bytes_per_token);
    if (std::isfinite(f.error_worst)) error_high = std::max(error_high, f.error_worst);
  }
  // Errors far below what rounding the output to bf16 costs are of no interest: they sit on the lower edge.
  const double floor = std::max(1e-6, std::min(report.bf16_rounding, report.options.max_error)) / 2;
  const double margin = 1.12;
  const Axis x(bytes_low / margin, bytes_high * margin, frame.x, frame.x + frame.width, true);
  const double ceiling = error_high * 1.7;
  const Axis y(floor, ceiling, frame.y + frame.height, frame.y, true);
  const auto height = [&](double error) { return y(std::clamp(error, floor, ceiling)); };

  Svg svg(kWidth, 512, "Output error against bytes per token for every format");
  draw_error_axes(svg, frame, x, y,
                  report.formats.front().bytes_per_token * report.formats.front().compression);
  draw_limit(svg, frame, height(report.options.max_error),
             fmt::format("limit {:g}%", 100 * report.options.max_error), "limit", true);
  draw_limit(svg, frame, height(report.bf16_rounding),
             fmt::format("rounding the output to bf16: {}", percent(report.bf16_rounding)), "reference",
             false);

  std::vector<Point> at;
  at.reserve(report.formats.size());
  for (const FormatResult& f : report.formats) at.push_back({x(f.bytes_per_token), height(f.error_worst)});
  svg.polyline(pareto_line(report, x, at), "pareto");

  const std::vector<Box> notes = {
      {frame.x, height(report.bf16_rounding) - 2, 240, 20},
      {frame.x + frame.width - 80, height(report.options.max_error) - 20, 80, 20}};
  std::vector<Label> labels = label_points(report, at, floor);
  if (recipe != nullptr) {
    const double bytes = recipe->bytes_per_token() / static_cast<double>(recipe->layers.size());
    at.push_back({x(std::max(bytes, bytes_low)), height(recipe->error_worst())});
    labels.insert(labels.begin(), {at.back(), "recipe", true, true, 1});
  }
  draw_labels(svg, labels, frame, notes);
  for (std::size_t i = 0; i < report.formats.size(); ++i) {
    const FormatResult& f = report.formats[i];
    if (static_cast<int>(i) == report.conclusion.chosen) svg.circle(at[i], kHalo, "halo");
    const bool rotated = f.choice.rotate_k || f.choice.rotate_v;
    const std::string css = fmt::format("dot {}{}", rotated ? "ring " : "", family(f.choice.k));
    if (f.error_worst < floor) {
      svg.triangle_down(at[i], kDot, css, format_tooltip(f));
    } else {
      svg.circle(at[i], kDot, css, format_tooltip(f));
    }
  }
  if (recipe != nullptr) {
    const double bytes = recipe->bytes_per_token() / static_cast<double>(recipe->layers.size());
    svg.diamond(at.back(), kDot + 2, "mixture",
                fmt::format("recipe: {:.0f} bytes/token on average, error {} worst layer", bytes,
                            percent(recipe->error_worst())));
  }
  draw_legend(svg, {frame.x + frame.width - 420, 18});
  return svg.str();
}

HeatScale heat_scale(const EvalReport& report, const std::vector<std::size_t>& formats) {
  HeatScale scale{1e30, 0};
  for (const std::size_t i : formats) {
    for (const LayerResult& layer : report.formats[i].layers) {
      for (const double e : layer.output.head_relative) {
        if (e > 0) scale.low = std::min(scale.low, e);
        if (std::isfinite(e)) scale.high = std::max(scale.high, e);
      }
    }
  }
  if (scale.high <= 0) return {1e-6, 1};
  scale.low = std::max(scale.low, scale.high / 1e4);
  if (scale.low >= scale.high) scale.low = scale.high / 2;
  return scale;
}

std::string plot_heat_legend(const HeatScale& scale) {
  Svg svg(kWidth, 40, "Colour scale of the heat maps");
  constexpr int kSteps = 60;
  const double left = 70, width = 360;
  for (int i = 0; i < kSteps; ++i) {
    const double error = scale.low * std::pow(scale.high / scale.low, (i + 0.5) / kSteps);
    svg.rect({left + width * i / kSteps, 4, width / kSteps + 0.5, 12}, "plain",
             heat_colour(scale, error).fill);
  }
  const Axis x(scale.low, scale.high, left, left + width, true);
  double last = -100;
  for (const double tick : x.ticks(8)) {
    if (x(tick) - last < 44) continue;
    last = x(tick);
    svg.line({last, 16}, {last, 20}, "axis");
    svg.text({last, 33}, fmt::format("{:g}%", 100 * tick), "tick", "middle");
  }
  svg.text({left + width + 16, 15}, "output error of one query head", "note");
  return svg.str();
}

std::string plot_heat_map(const EvalReport& report, std::size_t format, const HeatScale& scale) {
  const FormatResult& f = report.formats[format];
  std::size_t heads = 1, name_width = 0;
  for (const LayerResult& layer : f.layers) heads = std::max(heads, layer.output.head_relative.size());
  for (const LayerReport& layer : report.layers)
    name_width = std::max(name_width, printable(layer.shape.name(), 16).size());
  const double left = 16 + 6.6 * static_cast<double>(name_width);
  const double cell = std::min(104.0, (kWidth - left - 10) / static_cast<double>(heads));
  const double row = cell >= 34 ? 24 : 16;
  Svg svg(kWidth, 20 + row * static_cast<double>(f.layers.size()) + 4,
          fmt::format("Output error of {} by layer and query head", f.choice.name));
  const std::size_t stride = cell < 14 ? 8 : cell < 24 ? 4 : 1;
  for (std::size_t h = 0; h < heads; h += stride) {
    svg.text({left + cell * (static_cast<double>(h) + 0.5), 13},
             fmt::format("{}{}", h == 0 ? "head " : "", h), "tick", "middle");
  }
  for (std::size_t l = 0; l < f.layers.size(); ++l) {
    const double top = 20 + row * static_cast<double>(l);
    const std::string name = printable(report.layers[l].shape.name(), 16);
    svg.text({left - 8, top + row / 2 + 4}, name, "tick", "end");
    for (std::size_t h = 0; h < f.layers[l].output.head_relative.size(); ++h) {
      const double error = f.layers[l].output.head_relative[h];
      const HeatColour colour = heat_colour(scale, error);
      const Box box{left + cell * static_cast<double>(h), top, cell - 1, row - 1};
      svg.rect(box, "plain", colour.fill, fmt::format("{}, head {}: {}", name, h, percent(error)));
      if (cell >= 34) {
        svg.text({box.x + box.width / 2, top + row / 2 + 3.5}, percent(error),
                 colour.dark ? "cell light" : "cell", "middle");
      }
    }
  }
  return svg.str();
}

std::string plot_channels(const LayerReport& layer) {
  const Box frame{46, 26, kWidth - 56, 130};
  const auto channels = layer.k_channels.absmax.size();
  const double top = *std::max_element(layer.k_channels.absmax.begin(), layer.k_channels.absmax.end());
  const Axis x(0, static_cast<double>(channels), frame.x, frame.x + frame.width);
  const Axis y(0, top > 0 ? top * 1.05 : 1, frame.y + frame.height, frame.y);
  Svg svg(kWidth, frame.y + frame.height + 24,
          fmt::format("Largest K of each channel, {}", layer.shape.name()));
  for (const double tick : y.ticks(4)) {
    svg.line({frame.x, y(tick)}, {frame.x + frame.width, y(tick)}, "grid");
    svg.text({frame.x - 6, y(tick) + 4}, fmt::format("{:g}", tick), "tick", "end");
  }
  const auto steps = [&](const std::vector<float>& values) {
    std::vector<Point> points;
    for (std::size_t c = 0; c < values.size(); ++c) {
      points.push_back({x(static_cast<double>(c)), y(values[c])});
      points.push_back({x(static_cast<double>(c) + 1), y(values[c])});
    }
    return points;
  };
  svg.area(steps(layer.k_channels.absmax), frame.y + frame.height, "channels");
  svg.polyline(steps(layer.k_channels_rotated.absmax), "rotated");
  for (int h = 0; h < layer.shape.kv_heads; ++h) {
    const double begin = x(static_cast<double>(h) * layer.shape.head_dim);
    const double end = x(static_cast<double>(h + 1) * layer.shape.head_dim);
    if (h > 0) svg.line({begin, frame.y}, {begin, frame.y + frame.height}, "separator");
    if (end - begin > 26) {
      svg.text({(begin + end) / 2, frame.y + frame.height + 17},
               fmt::format("{}{}", end - begin > 70 ? "KV head " : "", h), "tick", "middle");
    }
  }
  svg.line({frame.x, frame.y + frame.height}, {frame.x + frame.width, frame.y + frame.height}, "axis");
  svg.text({frame.x, 14},
           fmt::format("{}: largest channel is {:.1f} times the median channel; {:.1f} times after rotation",
                       printable(layer.shape.name(), 30), layer.k_channels.outlier_ratio,
                       layer.k_channels_rotated.outlier_ratio),
           "label");
  return svg.str();
}

}  // namespace halftone::cli
