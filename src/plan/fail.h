// Throwing a formatted sentence: argument, value, limit and remedy.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "halftone/error.h"

namespace halftone::planning {

template <class... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> sentence, Args&&... args) {
  throw Error(code, fmt::format(sentence, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> sentence, Args&&... args) {
  fail(ErrorCode::kInvalidArgument, sentence, std::forward<Args>(args)...);
}

}  // namespace halftone::planning
