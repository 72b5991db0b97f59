// The halftone command: one function per subcommand adds it to the parser.
#pragma once

#include "cli/options/command_line.h"
#include "cli/options/validators.h"
#include "cli/terminal/terminal.h"

namespace halftone::cli {

/// Runs a command line as main() would. Errors become one line "halftone: error: ..." on `terminal.err` and
/// an exit code; nothing is thrown.
int run_command(int argc, const char* const* argv, Terminal terminal);

void add_eval(Command app, Terminal& terminal);
void add_recipe(Command app, Terminal& terminal);
void add_quantize(Command app, Terminal& terminal);
void add_dequantize(Command app, Terminal& terminal);
void add_bench(Command app, Terminal& terminal);
void add_doctor(Command app, Terminal& terminal);
void add_explain(Command app, Terminal& terminal);
void add_formats(Command app, Terminal& terminal);

}  // namespace halftone::cli
