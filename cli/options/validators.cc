#include "cli/options/validators.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

/// `text` as the parser will read it; false also when it says more than the number.
template <class Number>
bool read(const std::string& text, Number& number) {
  return !text.empty() && read_number(text, number);
}

}  // namespace

Check between(int low, int high) {
  return [low, high](const std::string& text) -> std::string {
    std::int64_t value = 0;
    if (!read(text, value)) {
      return fmt::format("is '{}', but must be a whole number, {} to {}", printable(text), low, high);
    }
    if (value >= low && value <= high) return "";
    return fmt::format("is {}, but must be {} to {}", printable(text), low, high);
  };
}

Check positive() {
  return [](const std::string& text) -> std::string {
    using Limits = std::numeric_limits<float>;
    double value = 0;
    if (read(text, value) && value >= Limits::min() && value <= Limits::max()) return "";
    return fmt::format("is '{}', but must be a finite number above 0, {:.1e} to {:.1e}", printable(text),
                       Limits::min(), Limits::max());
  };
}

Check one_of(std::vector<std::string> choices) {
  return [choices = std::move(choices)](const std::string& text) -> std::string {
    if (std::find(choices.begin(), choices.end(), text) != choices.end()) return "";
    return fmt::format("is '{}', but must be one of {}", printable(text), fmt::join(choices, ", "));
  };
}

Check not_empty() {
  return [](const std::string& text) -> std::string {
    return text.empty() ? "is '', but must not be empty" : "";
  };
}

}  // namespace halftone::cli
