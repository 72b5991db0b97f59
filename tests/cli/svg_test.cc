// Where the labels of the error plot go.
#include "cli/report/svg.h"

#include <gtest/gtest.h>

#include <cmath>

namespace halftone::cli {
namespace {

// The int4 formats of the shipped capture, which stand close together at the plot's edge.
TEST(SvgTest, LabelsLieBesideTheirMarks) {
  const std::vector<Point> marks = {{184, 531}, {184, 555}, {215, 550}, {273, 564},
                                    {273, 572}, {421, 597}, {421, 593}};
  std::vector<Anchor> anchors;
  for (const Point& at : marks) anchors.push_back({at, 6.5, 110});
  const Box bounds{122, 490, 848, 430};
  const std::vector<Box> boxes = place_labels(anchors, 15, bounds, {});
  ASSERT_EQ(boxes.size(), marks.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const Point near = nearest_point(boxes[i], marks[i]);
    EXPECT_LE(std::hypot(near.x - marks[i].x, near.y - marks[i].y), 6.5 + 20) << i;
    for (std::size_t j = 0; j < boxes.size(); ++j) {
      EXPECT_FALSE(i != j && boxes[i].overlaps(boxes[j])) << i << " and " << j;
      EXPECT_FALSE(boxes[i].overlaps({marks[j].x - 6.5, marks[j].y - 6.5, 13, 13})) << i << " and mark " << j;
    }
    EXPECT_GE(boxes[i].x, bounds.x);
  }
}

}  // namespace
}  // namespace halftone::cli
