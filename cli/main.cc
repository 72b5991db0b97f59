#include "cli/commands/command.h"

int main(int argc, char** argv) {
  return halftone::cli::run_command(argc, argv, halftone::cli::Terminal::standard());
}
