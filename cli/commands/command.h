// The halftone command: one function per subcommand adds it to the parser.
#pragma once

#include "cli/options/validators.h"
#include "cli/terminal/terminal.h"

namespace CLI {
class App;
}

namespace halftone::cli {

/// Runs a command line as main() would. Errors become one line "halftone: error: ..." on `terminal.err` and
/// an exit code; nothing is thrown.
int run_command(int argc, const char* const* argv, Terminal terminal);

void add_eval(CLI::App& app, Terminal& terminal);
void add_recipe(CLI::App& app, Terminal& terminal);
void add_quantize(CLI::App& app, Terminal& terminal);
void add_dequantize(CLI::App& app, Terminal& terminal);
void add_bench(CLI::App& app, Terminal& terminal);
void add_doctor(CLI::App& app, Terminal& terminal);
void add_explain(CLI::App& app, Terminal& terminal);
void add_formats(CLI::App& app, Terminal& terminal);

}  // namespace halftone::cli
