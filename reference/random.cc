#include "reference/random.h"

#include <algorithm>

#include "reference/normals.h"

namespace halftone::reference {

Random::Random(std::uint64_t seed) {
  for (std::uint64_t& s : state_) {
    seed += 0x9E3779B97F4A7C15U;
    std::uint64_t z = seed;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    s = z ^ (z >> 31);
  }
}

std::uint64_t Random::next() { return loops::xoshiro(state_); }

double Random::uniform() { return loops::uniform(next()); }

float Random::normal() {
  const double a = uniform();
  return loops::normal(a, uniform());
}

void Random::normals(std::span<float> x) { loops::normals(state_, x.data(), x.size()); }

std::int64_t Random::integer(std::int64_t low, std::int64_t high) {
  const auto range = static_cast<std::uint64_t>(high - low) + 1;
  return low + static_cast<std::int64_t>(range == 0 ? next() : next() % range);
}

void fill(Random& random, Data data, std::span<float> x, int heads, int dim) {
  const std::size_t row = static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim);
  if (row == 0) return;
  std::vector<float> gain(row, 1.0F);
  std::vector<float> offset(row, 0.0F);
  std::vector<float> direction(row);
  for (std::size_t i = 0; i < row && data == Data::kOutlierChannels; ++i) {
    if (!random.chance(1.0 / 32)) continue;
    gain[i] = 2;
    offset[i] = static_cast<float>((random.chance(0.5) ? 1 : -1) * (10 + 30 * random.uniform()));
  }
  if (data == Data::kSinkToken) {
    random.normals(direction);
  }
  const float constant = random.normal();
  switch (data) {
    case Data::kNormal:
    case Data::kOutlierChannels:
      random.normals(x);
      loops::scale_rows(x.data(), x.size(), gain.data(), offset.data(), row);
      break;
    case Data::kSinkToken: {
      random.normals(x);
      const std::size_t aligned = std::min(x.size(), 4 * row);
      for (std::size_t i = 0; i < aligned; ++i) x[i] = 0.05F * x[i] + 0.5F * direction[i % row];
      break;
    }
    case Data::kConstant:
      std::fill(x.begin(), x.end(), constant);
      break;
    case Data::kZero:
      std::fill(x.begin(), x.end(), 0.0F);
      break;
  }
}

std::vector<int> ragged_lengths(Random& random, int count, int low, int high) {
  std::vector<int> lengths;
  for (int i = 0; i < count; ++i) {
    const double kind = random.uniform();
    lengths.push_back(kind < 0.1 ? low : kind < 0.2 ? high : static_cast<int>(random.integer(low, high)));
  }
  return lengths;
}

}  // namespace halftone::reference
