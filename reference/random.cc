#include "reference/random.h"

#include <bit>
#include <cmath>
#include <numbers>

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

std::uint64_t Random::next() {
  const std::uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
  const std::uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

float Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return static_cast<float>(radius * std::cos(2 * std::numbers::pi * uniform()));
}

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
    for (float& d : direction) d = random.normal();
  }
  const float constant = random.normal();
  for (std::size_t i = 0; i < x.size(); ++i) {
    switch (data) {
      case Data::kNormal:
      case Data::kOutlierChannels:
        x[i] = gain[i % row] * random.normal() + offset[i % row];
        break;
      case Data::kSinkToken:
        x[i] = i / row < 4 ? 0.05F * random.normal() + 0.5F * direction[i % row] : random.normal();
        break;
      case Data::kConstant:
        x[i] = constant;
        break;
      case Data::kZero:
        x[i] = 0;
        break;
    }
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
