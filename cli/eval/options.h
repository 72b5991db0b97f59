// Options that `eval` and `recipe` share: how a capture is read and judged.
#pragma once

#include <string>

#include "cli/eval/evaluate.h"
#include "cli/options/command_line.h"

namespace halftone::cli {

struct EvalLine {
  std::string file;
  std::string formats;
  std::string layout = "thd";
  int threads = 0;
  EvalOptions options;
};

/// `line` must live as long as the parser.
void add_capture_options(Command command, EvalLine& line, const std::string& formats_help);

/// Reads what the texts say into `line.options` and sets the number of threads. Throws UsageError.
void finish_capture_options(EvalLine& line);

}  // namespace halftone::cli
