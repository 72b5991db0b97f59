#include "cli/recipe/frontier.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace halftone::cli {
namespace {

/// Keeps what nothing else matches in both, by rising bytes. Of equals the first in order stays, so that a
/// recipe does not depend on the sort.
template <class Entry>
void keep_best(std::vector<Entry>& entries) {
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.bytes, a.cost) < std::tie(b.bytes, b.cost);
  });
  std::size_t kept = 0;
  for (const Entry& entry : entries) {
    if (kept == 0 || entry.cost < entries[kept - 1].cost) entries[kept++] = entry;
  }
  entries.resize(kept);
}

}  // namespace

Frontier::Frontier(const std::vector<std::vector<LayerOption>>& layers) {
  std::vector<State> before = {State{}};
  for (const std::vector<LayerOption>& layer : layers) {
    std::vector<State> own;
    for (std::size_t i = 0; i < layer.size(); ++i) {
      if (std::isfinite(layer[i].cost)) {
        own.push_back({layer[i].bytes, layer[i].cost, -1, static_cast<int>(i)});
      }
    }
    keep_best(own);
    std::vector<State> next;
    next.reserve(before.size() * own.size());
    for (std::size_t b = 0; b < before.size(); ++b) {
      for (const State& o : own) {
        next.push_back({before[b].bytes + o.bytes, before[b].cost + o.cost, static_cast<int>(b), o.option});
      }
    }
    keep_best(next);
    next.shrink_to_fit();
    states_.push_back(next);
    before = std::move(next);
  }
  for (const State& s : before) totals_.push_back({s.bytes, s.cost});
}

int Frontier::cheapest_within(double bytes) const {
  int found = -1;
  for (std::size_t i = 0; i < totals_.size() && static_cast<double>(totals_[i].bytes) <= bytes; ++i) {
    found = static_cast<int>(i);
  }
  return found;
}

int Frontier::smallest_within(double cost) const {
  for (std::size_t i = 0; i < totals_.size(); ++i) {
    if (totals_[i].cost <= cost) return static_cast<int>(i);
  }
  return -1;
}

std::vector<int> Frontier::options(int total) const {
  std::vector<int> chosen(states_.size());
  int at = total;
  for (std::size_t layer = states_.size(); layer-- > 0;) {
    const State& state = states_[layer][static_cast<std::size_t>(at)];
    chosen[layer] = state.option;
    at = state.before;
  }
  return chosen;
}

}  // namespace halftone::cli
