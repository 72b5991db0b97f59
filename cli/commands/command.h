// The halftone command: one function per subcommand adds it to the parser.
#pragma once

#include <CLI/CLI.hpp>

#include "cli/terminal/terminal.h"

namespace halftone::cli {

/// Runs a command line as main() would. Errors become one line "halftone: error: ..." on `terminal.err` and
/// an exit code; nothing is thrown.
int run_command(int argc, const char* const* argv, Terminal terminal);

/// Bounds of an option; the help shows only the option's own words.
inline CLI::Validator between(int low, int high) { return CLI::Range(low, high).description(""); }
inline CLI::Validator positive() { return CLI::Validator(CLI::PositiveNumber).description(""); }

void add_eval(CLI::App& app, Terminal& terminal);
void add_quantize(CLI::App& app, Terminal& terminal);
void add_dequantize(CLI::App& app, Terminal& terminal);
void add_bench(CLI::App& app, Terminal& terminal);
void add_doctor(CLI::App& app, Terminal& terminal);
void add_explain(CLI::App& app, Terminal& terminal);
void add_formats(CLI::App& app, Terminal& terminal);

}  // namespace halftone::cli
