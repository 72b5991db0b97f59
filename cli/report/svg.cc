#include "cli/report/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

std::string points_text(const std::vector<Point>& points) {
  std::string text;
  for (const Point& p : points) text += fmt::format("{}{:.1f},{:.1f}", text.empty() ? "" : " ", p.x, p.y);
  return text;
}

std::string close_tag(std::string_view tag, std::string_view tooltip) {
  if (tooltip.empty()) return "/>\n";
  return fmt::format("><title>{}</title></{}>\n", html_escape(tooltip), tag);
}

}  // namespace

Svg::Svg(double width, double height, std::string_view title)
    : body_(fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">\n", width, height,
                        html_escape(title))) {}

void Svg::line(Point a, Point b, std::string_view css) {
  body_ += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" class=\"{}\"/>\n", a.x,
                       a.y, b.x, b.y, css);
}

void Svg::polyline(const std::vector<Point>& points, std::string_view css) {
  body_ += fmt::format("<polyline points=\"{}\" class=\"{}\"/>\n", points_text(points), css);
}

void Svg::area(const std::vector<Point>& points, double baseline, std::string_view css) {
  if (points.empty()) return;
  std::vector<Point> closed = points;
  closed.push_back({points.back().x, baseline});
  closed.push_back({points.front().x, baseline});
  body_ += fmt::format("<polygon points=\"{}\" class=\"{}\"/>\n", points_text(closed), css);
}

void Svg::rect(const Box& box, std::string_view css, std::string_view fill, std::string_view tooltip) {
  const std::string paint = fill.empty() ? "" : fmt::format(" fill=\"{}\"", fill);
  body_ += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" class=\"{}\"{}{}",
                       box.x, box.y, box.width, box.height, css, paint, close_tag("rect", tooltip));
}

void Svg::circle(Point centre, double radius, std::string_view css, std::string_view tooltip) {
  body_ += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" class=\"{}\"{}", centre.x, centre.y,
                       radius, css, close_tag("circle", tooltip));
}

void Svg::triangle_down(Point tip, double size, std::string_view css, std::string_view tooltip) {
  const std::vector<Point> corners = {
      tip, {tip.x - size, tip.y - 1.6 * size}, {tip.x + size, tip.y - 1.6 * size}};
  body_ += fmt::format("<polygon points=\"{}\" class=\"{}\"{}", points_text(corners), css,
                       close_tag("polygon", tooltip));
}

void Svg::diamond(Point c, double size, std::string_view css, std::string_view tooltip) {
  const std::vector<Point> corners = {
      {c.x - size, c.y}, {c.x, c.y - size}, {c.x + size, c.y}, {c.x, c.y + size}};
  body_ += fmt::format("<polygon points=\"{}\" class=\"{}\"{}", points_text(corners), css,
                       close_tag("polygon", tooltip));
}

void Svg::text(Point at, std::string_view content, std::string_view css, std::string_view anchor) {
  body_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\" text-anchor=\"{}\">{}</text>\n", at.x,
                       at.y, css, anchor, html_escape(content));
}

std::string Svg::str() const { return body_ + "</svg>\n"; }

Axis::Axis(double low, double high, double pixel_low, double pixel_high, bool logarithmic)
    : low_(low),
      high_(high > low ? high : low + 1),
      pixel_low_(pixel_low),
      pixel_high_(pixel_high),
      logarithmic_(logarithmic) {}

double Axis::operator()(double value) const {
  const double share =
      logarithmic_ ? std::log(value / low_) / std::log(high_ / low_) : (value - low_) / (high_ - low_);
  return pixel_low_ + share * (pixel_high_ - pixel_low_);
}

std::vector<double> Axis::ticks(int count) const {
  std::vector<double> ticks;
  if (logarithmic_) {
    const double decades = std::log10(high_ / low_);
    for (int e = static_cast<int>(std::floor(std::log10(low_))); e <= std::ceil(std::log10(high_)); ++e) {
      for (const double m : {1.0, 2.0, 5.0}) {
        const double value = m * std::pow(10.0, e);
        if (m != 1 && decades * 3 > count) continue;
        if (value >= low_ * 0.999 && value <= high_ * 1.001) ticks.push_back(value);
      }
    }
    return ticks;
  }
  const double rough = (high_ - low_) / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  const double step = rough / power < 1.5   ? power
                      : rough / power < 3.5 ? 2 * power
                      : rough / power < 7.5 ? 5 * power
                                            : 10 * power;
  const double first = std::ceil(low_ / step);
  for (int i = 0; (first + i) * step <= high_ + step * 1e-9; ++i) ticks.push_back((first + i) * step);
  return ticks;
}

double text_width(std::string_view text, double font_size) {
  return 0.56 * font_size * static_cast<double>(display_width(text));
}

namespace {

/// The box of a label that lies `gap` away from its anchor's mark in a direction.
Box box_beside(const Anchor& a, double height, Point direction, double gap) {
  const double reach = a.radius + gap, w = a.label_width;
  const auto side = [&](double at, double along, double size) {
    if (along > 0.3) return at + reach * along;
    if (along < -0.3) return at + reach * along - size;
    return at - size / 2;
  };
  return {side(a.at.x, direction.x, w), side(a.at.y, direction.y, height), w, height};
}

bool holds(const Box& outer, const Box& inner) {
  return inner.x >= outer.x && inner.x + inner.width <= outer.x + outer.width && inner.y >= outer.y &&
         inner.y + inner.height <= outer.y + outer.height;
}

/// Whether the line from `a` to `b` passes through the box.
bool crosses(const Box& box, Point a, Point b) {
  constexpr int kSteps = 24;
  for (int i = 0; i <= kSteps; ++i) {
    const double share = static_cast<double>(i) / kSteps;
    if (box.overlaps({a.x + share * (b.x - a.x), a.y + share * (b.y - a.y), 0.1, 0.1})) return true;
  }
  return false;
}

}  // namespace

Point nearest_point(const Box& box, Point at) {
  return {std::clamp(at.x, box.x, box.x + box.width), std::clamp(at.y, box.y, box.y + box.height)};
}

std::vector<Box> place_labels(const std::vector<Anchor>& anchors, double height, const Box& bounds,
                              const std::vector<Box>& obstacles) {
  constexpr int kDirections = 16, kPasses = 4;
  constexpr std::array<double, 11> kGaps = {2, 5, 9, 14, 20, 27, 35, 45, 57, 71, 90};
  std::vector<Box> marks = obstacles;
  for (const Anchor& a : anchors)
    marks.push_back({a.at.x - a.radius, a.at.y - a.radius, 2 * a.radius, 2 * a.radius});
  std::vector<Box> boxes(anchors.size(), Box{-1e6, -1e6, 0, 0});
  // The first pass places them one after another, the others each among all the rest.
  for (int pass = 0; pass < kPasses; ++pass) {
    for (std::size_t i = 0; i < anchors.size(); ++i) {
      const Anchor& a = anchors[i];
      double best_cost = 1e30;
      Box best;
      for (const double gap : kGaps) {
        for (int d = 0; d < kDirections; ++d) {
          const double angle = 2 * std::numbers::pi * d / kDirections;
          const Box box = box_beside(a, height, {std::cos(angle), std::sin(angle)}, gap);
          const Point end = nearest_point(box, a.at);
          double cost = 0.15 * gap + (d == 0 ? 0 : d == kDirections / 2 ? 0.3 : 0.6);
          if (!holds(bounds, box)) cost += 500;
          for (std::size_t m = 0; m < marks.size() && cost < best_cost; ++m) {
            const bool own = m == obstacles.size() + i;
            if (box.overlaps(marks[m])) cost += 60;
            if (!own && gap > kLeaderGap && crosses(marks[m], a.at, end)) cost += 4;
          }
          for (std::size_t o = 0; o < boxes.size() && cost < best_cost; ++o) {
            if (o == i) continue;
            if (box.overlaps(boxes[o])) cost += 120;
            if (gap > kLeaderGap && crosses(boxes[o], a.at, end)) cost += 8;
          }
          if (cost < best_cost) {
            best_cost = cost;
            best = box;
          }
        }
      }
      boxes[i] = best;
    }
  }
  return boxes;
}

}  // namespace halftone::cli
