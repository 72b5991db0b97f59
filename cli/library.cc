// The command inside the Python package's native library, where cli/launch.py finds it: so a wheel has the
// kernels once.
#include "cli/commands/command.h"
#include "halftone/types.h"

extern "C" HALFTONE_API int halftone_command(int argc, const char* const* argv) {
  return halftone::cli::run_command(argc, argv, halftone::cli::Terminal::standard());
}
