// Which choice for which layer: an exact knapsack over layers, by dynamic programming.
#pragma once

#include <cstdint>
#include <vector>

namespace halftone::cli {

/// One way to store a layer.
struct LayerOption {
  std::int64_t bytes = 0;  ///< of a page, so that sizes are whole numbers
  double cost = 0;         ///< what adds over layers: the squared relative output error; may be infinite
};

/// Every best compromise between the bytes of all layers and the sum of their costs.
///
/// Each layer takes one of its options. A total is kept when no other has as few bytes and as little cost
/// (Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation", 1969); since what is kept
/// of the first n layers does not depend on the others, the totals of n + 1 layers follow from those of n.
class Frontier {
 public:
  struct Total {
    std::int64_t bytes = 0;
    double cost = 0;
  };

  /// `layers` has at least one entry, each with an option. Options of infinite cost are left out; where a
  /// layer has no other, there is no total.
  explicit Frontier(const std::vector<std::vector<LayerOption>>& layers);

  /// By rising bytes and falling cost.
  const std::vector<Total>& totals() const { return totals_; }

  /// Position of the least cost within `bytes`, or -1.
  int cheapest_within(double bytes) const;
  /// Position of the fewest bytes whose cost is at most `cost`, or -1.
  int smallest_within(double cost) const;

  /// For each layer the position of its option in a total.
  std::vector<int> options(int total) const;

 private:
  struct State {
    std::int64_t bytes = 0;
    double cost = 0;
    int before = -1;  // position in the states of the layers before
    int option = -1;
  };
  std::vector<std::vector<State>> states_;  // of the first n + 1 layers
  std::vector<Total> totals_;
};

}  // namespace halftone::cli
