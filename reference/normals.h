// Normal numbers, many at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace halftone::reference::loops {

/// A step of xoshiro256**.
inline std::uint64_t xoshiro(std::uint64_t (&state)[4]) {
  const auto rotated = [](std::uint64_t x, int bits) { return x << bits | x >> (64 - bits); };
  const std::uint64_t result = rotated(state[1] * 5, 7) * 9;
  const std::uint64_t t = state[1] << 17;
  state[2] ^= state[0];
  state[3] ^= state[1];
  state[1] ^= state[2];
  state[0] ^= state[3];
  state[2] ^= t;
  state[3] = rotated(state[3], 45);
  return result;
}

/// Of 64 random bits, [0, 1).
inline double uniform(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1.0p-53; }

/// Box and Muller's normal number of two from [0, 1), by the C library.
float normal(double a, double b);

/// x[i] = normal() of the next two numbers, bit for bit, in a third of the time.
void normals(std::uint64_t (&state)[4], float* x, std::size_t count);

/// x[i] = gain[i % row] * x[i] + offset[i % row].
void scale_rows(float* x, std::size_t count, const float* gain, const float* offset, std::size_t row);

}  // namespace halftone::reference::loops
