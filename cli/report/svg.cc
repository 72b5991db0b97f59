#include "cli/report/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

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
  for (double value = std::ceil(low_ / step) * step; value <= high_ + step * 1e-9; value += step)
    ticks.push_back(value);
  return ticks;
}

double text_width(std::string_view text, double font_size) {
  return 0.56 * font_size * static_cast<double>(display_width(text));
}

std::vector<Box> place_labels(const std::vector<Anchor>& anchors, double height, const Box& bounds,
                              const std::vector<Box>& obstacles) {
  std::vector<Box> taken = obstacles;
  for (const Anchor& a : anchors)
    taken.push_back({a.at.x - a.radius, a.at.y - a.radius, 2 * a.radius, 2 * a.radius});
  const std::size_t fixed = taken.size();
  std::vector<Box> boxes;
  for (const Anchor& a : anchors) {
    const double w = a.label_width;
    Box best;
    double best_cost = 1e30;
    for (int ring = 0; ring < 14; ++ring) {  // further and further above and below
      for (const bool right : {true, false}) {
        for (const int sign : {-1, 1}) {
          if (ring == 0 && sign > 0) continue;
          const double distance = a.radius + 3 + (ring > 1 ? 6.0 + 2.0 * ring : 0);
          const Box box{right ? a.at.x + distance : a.at.x - distance - w,
                        a.at.y - height / 2 + sign * ring * height * 0.55, w, height};
          const bool inside = box.x >= bounds.x && box.x + w <= bounds.x + bounds.width &&
                              box.y >= bounds.y && box.y + height <= bounds.y + bounds.height;
          double cost = ring + (right ? 0 : 0.4) + (inside ? 0 : 500);
          for (std::size_t t = 0; t < taken.size(); ++t)
            cost += box.overlaps(taken[t]) ? (t < fixed ? 60 : 120) : 0;
          if (cost < best_cost) {
            best_cost = cost;
            best = box;
          }
        }
      }
    }
    boxes.push_back(best);
    taken.push_back(best);
  }
  return boxes;
}

}  // namespace halftone::cli
