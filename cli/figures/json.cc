#include "cli/figures/json.h"

#include <cmath>

#include "cli/terminal/text.h"

namespace halftone::cli {

nlohmann::ordered_json number_or_text(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(short_number(value));
}

nlohmann::ordered_json snr_json(double value) {
  const bool exact = std::isinf(value) && value > 0;
  return exact ? nlohmann::ordered_json(nullptr) : number_or_text(value);
}

}  // namespace halftone::cli
