// Seeded generators whose values do not depend on the platform's <random>.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace halftone::reference {

/// xoshiro256** (Blackman and Vigna, arXiv:1805.01407), seeded by splitmix64.
class Random {
 public:
  explicit Random(std::uint64_t seed);
  std::uint64_t next();
  double uniform();                                           ///< [0, 1)
  float normal();                                             ///< mean 0, deviation 1
  void normals(std::span<float> x);                           ///< x[i] = normal(), faster
  std::int64_t integer(std::int64_t low, std::int64_t high);  ///< [low, high]
  bool chance(double probability) { return uniform() < probability; }
  template <class T, std::size_t N>
  T pick(const std::array<T, N>& choices) {
    return choices[static_cast<std::size_t>(integer(0, N - 1))];
  }
  template <class T>
  T pick(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(choices.size()) - 1))];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1],
                values[static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(i) - 1))]);
    }
  }

 private:
  std::uint64_t state_[4];
};

/// What K, V and Q look like.
enum class Data : std::uint8_t {
  kNormal,           ///< independent N(0, 1)
  kOutlierChannels,  ///< N(0, 1), but one dim in 32 of a head is 10 to 40 times larger with a fixed sign, as
                     ///< in real K
  kSinkToken,        ///< N(0, 1), but the first tokens are small and aligned, as attention sinks are
  kConstant,         ///< every element equal: all logits equal
  kZero,             ///< every element zero
};

/// Fills x [tokens, heads, dim].
void fill(Random& random, Data data, std::span<float> x, int heads, int dim);

/// `count` lengths in [low, high], with the extremes drawn more often than others.
std::vector<int> ragged_lengths(Random& random, int count, int low, int high);

}  // namespace halftone::reference
