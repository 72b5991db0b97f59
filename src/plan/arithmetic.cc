#include <array>

#include "halftone/attention.h"
#include "plan/fail.h"

namespace halftone {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"16-bit", "half_int8", "full_int8", "fp8"};
static_assert(kNames.size() == static_cast<std::size_t>(Arithmetic::kFp8) + 1);

}  // namespace

std::string_view arithmetic_name(Arithmetic arithmetic) {
  const auto i = static_cast<std::size_t>(arithmetic);
  return i < kNames.size() ? kNames[i] : "unknown";
}

Arithmetic parse_arithmetic(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Arithmetic>(i);
  }
  planning::invalid("arithmetic is '{}', but must be 16-bit, half_int8, full_int8 or fp8: use 16-bit.", name);
}

}  // namespace halftone
