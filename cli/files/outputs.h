// What a command writes, and to which files: checked before it works, none may be lost under another.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/terminal/terminal.h"

namespace halftone::cli {

/// A file and what names it in a sentence.
struct NamedFile {
  std::string_view option;  ///< "--html"
  std::string path;         ///< of an output: "" when it was not asked for, "-" for standard output
};

/// Throws UsageError when an output is `input` or another output, under whatever name (a link, another
/// spelling): writing it would lose the other one. Only regular files can be lost so.
void check_outputs(const NamedFile& input, const std::vector<NamedFile>& outputs);

/// Writes `text` to the file `path`, or to the terminal's stdout when `path` is "-".
void write_output(Terminal& terminal, const std::string& path, std::string_view text);

}  // namespace halftone::cli
