// Figures as JSON has them.
#pragma once

#include <nlohmann/json.hpp>

namespace halftone::cli {

/// A number, or the text "inf" or "-inf".
nlohmann::ordered_json number_or_text(double value);

/// Likewise; +infinity is null.
nlohmann::ordered_json snr_json(double value);

}  // namespace halftone::cli
