// Checks of option values. A sentence says value and limit; the parser puts the option's name before it.
#pragma once

#include <string>
#include <vector>

#include "cli/options/command_line.h"

namespace halftone::cli {

/// A whole number of [low, high].
Check between(int low, int high);

/// A number above 0 that fp32 holds.
Check positive();

Check one_of(std::vector<std::string> choices);

/// Anything but "", which a parser may otherwise read as 0 or as an option that was not given.
Check not_empty();

}  // namespace halftone::cli
