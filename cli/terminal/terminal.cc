#include "cli/terminal/terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

bool set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

bool dumb() {
  const char* term = std::getenv("TERM");
  return term == nullptr || std::string_view(term) == "dumb";
}

}  // namespace

Terminal Terminal::standard() {
  return {std::cout, std::cerr, ::isatty(STDERR_FILENO) == 1 && !dumb(),
          ::isatty(STDOUT_FILENO) == 1 && !dumb() && !set("NO_COLOR")};
}

std::string Terminal::styled(std::string_view text, const char* code) const {
  return colour ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : std::string(text);
}

void print_formatted(std::ostream& out, fmt::string_view format, fmt::format_args values) {
  out << fmt::vformat(format, values);
}

Progress::Progress(Terminal& terminal, std::int64_t steps) : terminal_(terminal), steps_(steps) {}

Progress::~Progress() {
  if (terminal_.progress && drawn_ != Clock::time_point{}) terminal_.err << "\r\x1b[K" << std::flush;
}

void Progress::step(std::string_view what) {
  ++done_;
  const Clock::time_point now = Clock::now();
  if (!terminal_.progress || now - drawn_ < std::chrono::milliseconds(80)) return;
  drawn_ = now;
  constexpr int kWidth = 24;
  const double share = static_cast<double>(done_) / static_cast<double>(steps_);
  const int filled = static_cast<int>(share * kWidth);
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::string rest;
  if (done_ > 0 && elapsed > 1) rest = fmt::format(", {:.0f} s left", elapsed / share * (1 - share));
  print(terminal_.err, "\r\x1b[K[{}{}] {}/{} {}{}", std::string(static_cast<std::size_t>(filled), '#'),
        std::string(static_cast<std::size_t>(kWidth - filled), '.'), done_, steps_, printable(what, 40),
        rest);
  terminal_.err << std::flush;
}

}  // namespace halftone::cli
