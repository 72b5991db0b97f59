// The knapsack over layers against all combinations.
#include "cli/recipe/frontier.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference/random.h"

namespace halftone::cli {
namespace {

using Layers = std::vector<std::vector<LayerOption>>;

/// Every combination of options as a total, in the order of a counter.
std::vector<Frontier::Total> all_totals(const Layers& layers) {
  std::vector<Frontier::Total> totals = {{}};
  for (const std::vector<LayerOption>& layer : layers) {
    std::vector<Frontier::Total> next;
    for (const Frontier::Total& t : totals) {
      for (const LayerOption& o : layer) next.push_back({t.bytes + o.bytes, t.cost + o.cost});
    }
    totals = std::move(next);
  }
  return totals;
}

/// Costs are multiples of 1/64: their sums are exact, whatever the order.
Layers random_layers(reference::Random& random) {
  Layers layers(static_cast<std::size_t>(random.integer(1, 5)));
  for (std::vector<LayerOption>& layer : layers) {
    layer.resize(static_cast<std::size_t>(random.integer(1, 5)));
    for (LayerOption& option : layer) {
      option = {random.integer(1, 12), static_cast<double>(random.integer(0, 39)) / 64};
    }
  }
  return layers;
}

TEST(FrontierTest, AgreesWithAllCombinations) {
  reference::Random random(11);
  for (int round = 0; round < 300; ++round) {
    const Layers layers = random_layers(random);
    const std::vector<Frontier::Total> all = all_totals(layers);
    const Frontier frontier(layers);
    for (double budget = 0; budget <= 60; budget += 1.5) {
      double best = std::numeric_limits<double>::infinity();
      for (const Frontier::Total& t : all) {
        if (static_cast<double>(t.bytes) <= budget) best = std::min(best, t.cost);
      }
      const int found = frontier.cheapest_within(budget);
      ASSERT_EQ(found >= 0, std::isfinite(best));
      if (found >= 0) {
        ASSERT_EQ(frontier.totals()[static_cast<std::size_t>(found)].cost, best);
      }
    }
    for (double limit = 0; limit <= 3; limit += 0.0625) {
      std::int64_t fewest = -1;
      for (const Frontier::Total& t : all) {
        if (t.cost <= limit && (fewest < 0 || t.bytes < fewest)) fewest = t.bytes;
      }
      const int found = frontier.smallest_within(limit);
      ASSERT_EQ(found >= 0, fewest >= 0);
      if (found >= 0) {
        ASSERT_EQ(frontier.totals()[static_cast<std::size_t>(found)].bytes, fewest);
      }
    }
  }
}

TEST(FrontierTest, OptionsMakeTheTotal) {
  reference::Random random(12);
  for (int round = 0; round < 300; ++round) {
    const Layers layers = random_layers(random);
    const Frontier frontier(layers);
    ASSERT_FALSE(frontier.totals().empty());
    for (std::size_t i = 0; i < frontier.totals().size(); ++i) {
      const Frontier::Total& total = frontier.totals()[i];
      if (i > 0) {
        ASSERT_GT(total.bytes, frontier.totals()[i - 1].bytes);
        ASSERT_LT(total.cost, frontier.totals()[i - 1].cost);
      }
      const std::vector<int> options = frontier.options(static_cast<int>(i));
      ASSERT_EQ(options.size(), layers.size());
      Frontier::Total sum;
      for (std::size_t l = 0; l < layers.size(); ++l) {
        const LayerOption& option = layers[l].at(static_cast<std::size_t>(options[l]));
        sum.bytes += option.bytes;
        sum.cost += option.cost;
      }
      ASSERT_EQ(sum.bytes, total.bytes);
      ASSERT_EQ(sum.cost, total.cost);
    }
  }
}

TEST(FrontierTest, InfiniteCostsAreNeverChosen) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Frontier one({{{1, infinity}, {5, 1}}, {{1, 2}, {3, infinity}}});
  ASSERT_EQ(one.totals().size(), 1U);
  EXPECT_EQ(one.options(0), (std::vector<int>{1, 0}));
  const Frontier none({{{1, infinity}}, {{1, 2}}});
  EXPECT_TRUE(none.totals().empty());
  EXPECT_EQ(none.cheapest_within(100), -1);
  EXPECT_EQ(none.smallest_within(100), -1);
}

// As many layers and formats as the largest models have, with sizes as of 8 KV heads of 128.
TEST(FrontierTest, ManyLayersAreNoTrouble) {
  reference::Random random(13);
  Layers layers(128);
  for (std::vector<LayerOption>& layer : layers) {
    for (const std::int64_t bytes :
         {4096, 3072, 2688, 2624, 2176, 2112, 2080, 1728, 1600, 1280, 1152, 1088}) {
      layer.push_back({bytes * 64, std::pow(16.0, -static_cast<double>(bytes) / 1024) *
                                       (0.5 + static_cast<double>(random.integer(0, 999)) / 1000)});
    }
  }
  const Frontier frontier(layers);
  EXPECT_GT(frontier.totals().size(), 1000U);
  EXPECT_EQ(frontier.totals().front().bytes, 128 * 1088 * 64);
}

}  // namespace
}  // namespace halftone::cli
