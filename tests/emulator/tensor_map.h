// Tensor maps as the emulator's cuTensorMapEncodeTiled() makes them.
#pragma once

#include <array>
#include <cstdint>

namespace halftone::emulator {

/// In the 128 bytes of a CUtensorMap.
struct TensorMap {
  enum Direction : std::uint8_t { kLoad, kStore };

  std::uint64_t magic;
  std::uint64_t base;
  std::array<std::uint64_t, 5> dims;
  std::array<std::uint32_t, 5> box;
  std::uint8_t rank, element_bytes, swizzle;  ///< of 0, 32, 64, 128 bytes: 0, 1, 2, 3
  std::uint8_t unused;
  std::array<std::uint64_t, 5> strides;  ///< bytes

  static constexpr std::uint64_t kMagic = 0x68616c66746f6e65;

  /// The map at an address; throws Fault unless there is one of this rank.
  static TensorMap at(const std::uint8_t* p, int rank);
  std::uint32_t box_bytes() const;
  /// Copies the box at these coordinates to or from offset `to` of a block's shared memory, swizzled. What
  /// lies outside the tensor is zeros, or is not written.
  void copy(const std::array<std::int64_t, 5>& first, std::uint8_t* shared, std::uint32_t to,
            Direction direction) const;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace halftone::emulator
