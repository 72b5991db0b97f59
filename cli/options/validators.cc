#include "cli/options/validators.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

/// `refuse` returns the sentence after the option's name, or "". The help shows only the option's own words.
CLI::Validator check(std::function<std::string(std::string&)> refuse) { return {std::move(refuse), ""}; }

/// `text` as the parser will read it; false also when it says more than the number.
template <class Number>
bool read(const std::string& text, Number& number) {
  return !text.empty() && CLI::detail::lexical_cast(text, number);
}

}  // namespace

CLI::Validator between(int low, int high) {
  return check([low, high](const std::string& text) -> std::string {
    std::int64_t value = 0;
    if (!read(text, value)) {
      return fmt::format("is '{}', but must be a whole number, {} to {}", printable(text), low, high);
    }
    if (value >= low && value <= high) return "";
    return fmt::format("is {}, but must be {} to {}", printable(text), low, high);
  });
}

CLI::Validator positive() {
  return check([](const std::string& text) -> std::string {
    using Limits = std::numeric_limits<float>;
    double value = 0;
    if (read(text, value) && value >= Limits::min() && value <= Limits::max()) return "";
    return fmt::format("is '{}', but must be a finite number above 0, {:.1e} to {:.1e}", printable(text),
                       Limits::min(), Limits::max());
  });
}

CLI::Validator one_of(std::vector<std::string> choices) {
  return check([choices = std::move(choices)](const std::string& text) -> std::string {
    if (std::find(choices.begin(), choices.end(), text) != choices.end()) return "";
    return fmt::format("is '{}', but must be one of {}", printable(text), fmt::join(choices, ", "));
  });
}

CLI::Validator not_empty() {
  return check([](const std::string& text) -> std::string {
    return text.empty() ? "is '', but must not be empty" : "";
  });
}

}  // namespace halftone::cli
