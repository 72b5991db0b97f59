#include "tests/emulator/tensor_map.h"

#include <cstring>

#include "tests/emulator/machine.h"

namespace halftone::emulator {

TensorMap TensorMap::at(const std::uint8_t* p, int rank) {
  TensorMap map;
  std::memcpy(&map, p, sizeof map);
  if (map.magic != kMagic) throw Fault("a tensor copy by what is no tensor map");
  if (map.rank != rank) throw Fault("a tensor copy of another rank than its map");
  return map;
}

std::uint32_t TensorMap::box_bytes() const {
  std::uint32_t bytes = element_bytes;
  for (int n = 0; n < rank; ++n) bytes *= box[static_cast<std::size_t>(n)];
  return bytes;
}

void TensorMap::copy(const std::array<std::int64_t, 5>& first, std::uint8_t* shared, std::uint32_t to,
                     Direction direction) const {
  std::array<std::uint32_t, 5> at{};
  const std::uint32_t total = box_bytes();
  for (std::uint32_t byte = 0; byte < total; byte += element_bytes) {
    bool inside = true;
    std::uint64_t address = base;
    for (std::size_t n = 0; n < rank; ++n) {
      const std::int64_t x = first[n] + at[n];
      inside = inside && x >= 0 && x < static_cast<std::int64_t>(dims[n]);
      address += static_cast<std::uint64_t>(x) * strides[n];
    }
    std::uint32_t place = to + byte;
    if (swizzle != 0) place ^= (place >> 7 & ((2u << (swizzle - 1)) - 1)) << 4;
    if (direction == kStore) {
      if (inside) std::memcpy(global_bytes(address, element_bytes), shared + place, element_bytes);
    } else if (inside) {
      std::memcpy(shared + place, global_bytes(address, element_bytes), element_bytes);
    } else {
      std::memset(shared + place, 0, element_bytes);
    }
    for (std::size_t n = 0; n < rank && ++at[n] == box[n]; ++n) at[n] = 0;
  }
}

}  // namespace halftone::emulator
