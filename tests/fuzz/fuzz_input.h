// Decodes a fuzzer's bytes, front to back, into values; past the end everything is zero.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <vector>

#include "halftone/error.h"

namespace halftone::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  /// Little-endian bytes of a T.
  template <class T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    std::array<std::uint8_t, sizeof(T)> bytes{};
    for (std::uint8_t& b : bytes) b = at_ < size_ ? data_[at_++] : 0;
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }

  /// A value of [low, high] from two bytes.
  std::int32_t range(std::int32_t low, std::int32_t high) {
    return low + take<std::uint16_t>() % (high - low + 1);
  }
  bool flag() { return take<std::uint8_t>() % 2 == 1; }

  /// True for one byte value in 256: what is rarely interesting.
  bool rare() { return take<std::uint8_t>() == 0xff; }

  template <class T, std::size_t N>
  T pick(const std::array<T, N>& choices) {
    return choices[take<std::uint8_t>() % N];
  }

  bool empty() const { return at_ >= size_; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

/// Ends the process, as a broken property must.
inline void require(bool ok, const char* property) {
  if (ok) return;
  std::fprintf(stderr, "broken property: %s\n", property);
  std::abort();
}

/// Runs `body`; true when it succeeded, false when it refused its input. A refusal is a halftone::Error other
/// than Internal whose sentence says something; every other exception escapes and ends the process.
template <class Body>
bool accepted(Body&& body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    require(error.code() != ErrorCode::kInternal, "no input causes an Internal error");
    require(std::string_view(error.what()).size() > 10, "an error is a sentence");
    return false;
  }
}

}  // namespace halftone::fuzz
