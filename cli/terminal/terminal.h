// Where a command prints, and how: streams, colour, progress.
#pragma once

#include <fmt/core.h>

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <stdexcept>
#include <string>
#include <string_view>

namespace halftone::cli {

/// Exit codes, stated in the help.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

/// A command line that asks for something that does not exist: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Terminal {
  std::ostream& out;
  std::ostream& err;
  bool progress = false;  ///< stderr is a terminal that understands cursor movement
  bool colour = false;    ///< stdout is a terminal and NO_COLOR is unset (no-color.org)

  /// stdout and stderr of the process.
  static Terminal standard();

  std::string bold(std::string_view text) const { return styled(text, "1"); }
  std::string dim(std::string_view text) const { return styled(text, "2"); }

 private:
  std::string styled(std::string_view text, const char* code) const;
};

void print_formatted(std::ostream& out, fmt::string_view format, fmt::format_args values);

/// Writes what fmt::format() returns. fmt::print() to a stream would compile all of that in each source.
template <class... Values>
void print(std::ostream& out, fmt::format_string<Values...> format, Values&&... values) {
  print_formatted(out, format, fmt::make_format_args(values...));
}

/// A bar on stderr for long work; writes nothing when stderr is no terminal. Erases itself at the end.
class Progress {
 public:
  Progress(Terminal& terminal, std::int64_t steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Announces the step that begins now. Redraws at most every 80 ms.
  void step(std::string_view what);

 private:
  using Clock = std::chrono::steady_clock;
  Terminal& terminal_;
  std::int64_t steps_;
  std::int64_t done_ = -1;
  Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_{};
};

}  // namespace halftone::cli
