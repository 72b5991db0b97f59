// Inline SVG made of a few primitives; colours come from the page's CSS classes, so that plots follow its
// theme.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace halftone::cli {

struct Point {
  double x = 0, y = 0;
};

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
  bool overlaps(const Box& other) const {
    return x < other.x + other.width && other.x < x + width && y < other.y + other.height &&
           other.y < y + height;
  }
};

class Svg {
 public:
  /// `title` is what screen readers say.
  Svg(double width, double height, std::string_view title);

  void line(Point a, Point b, std::string_view css);
  void polyline(const std::vector<Point>& points, std::string_view css);
  void area(const std::vector<Point>& points, double baseline, std::string_view css);
  void rect(const Box& box, std::string_view css, std::string_view fill = "", std::string_view tooltip = "");
  void circle(Point centre, double radius, std::string_view css, std::string_view tooltip = "");
  void triangle_down(Point tip, double size, std::string_view css, std::string_view tooltip = "");
  void diamond(Point centre, double size, std::string_view css, std::string_view tooltip = "");
  /// `anchor`: "start", "middle" or "end".
  void text(Point at, std::string_view content, std::string_view css, std::string_view anchor = "start");

  std::string str() const;

 private:
  std::string body_;
};

/// Maps values to pixels.
class Axis {
 public:
  Axis(double low, double high, double pixel_low, double pixel_high, bool logarithmic = false);
  double operator()(double value) const;
  /// Round values within the axis, about `count` of them (powers of ten and their 1-2-5 steps when
  /// logarithmic).
  std::vector<double> ticks(int count) const;

 private:
  double low_, high_, pixel_low_, pixel_high_;
  bool logarithmic_;
};

/// Rough width of sans-serif text in pixels.
double text_width(std::string_view text, double font_size);

/// A mark that gets a label.
struct Anchor {
  Point at;
  double radius = 0;
  double label_width = 0;
};

/// A label farther from its mark than this needs a line that leads to it.
inline constexpr double kLeaderGap = 9;

/// The point of a box that is nearest to another.
Point nearest_point(const Box& box, Point at);

/// Places one label per anchor, as near as it can be without overlapping another label, an anchor or an
/// obstacle; earlier anchors choose first. Returns the box of each label.
std::vector<Box> place_labels(const std::vector<Anchor>& anchors, double height, const Box& bounds,
                              const std::vector<Box>& obstacles);

}  // namespace halftone::cli
