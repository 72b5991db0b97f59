// Expects one halftone::Error with a code and a sentence that holds every given fragment: argument, value,
// limit, remedy.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>

#include "halftone/error.h"

namespace halftone {

template <class Fragments = std::initializer_list<std::string_view>, class Call>
void expect_error(ErrorCode code, const Fragments& fragments, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string sentence = error.what();
    EXPECT_STREQ(error_code_name(error.code()), error_code_name(code)) << sentence;
    for (const std::string_view fragment : fragments) {
      EXPECT_NE(sentence.find(fragment), std::string::npos)
          << '"' << fragment << "\" is not in: " << sentence;
    }
    EXPECT_NE(sentence.find(": "), std::string::npos) << "no remedy in: " << sentence;
    EXPECT_EQ(sentence.back(), '.') << sentence;
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a halftone::Error: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error, but expected " << error_code_name(code);
}

}  // namespace halftone
