// From the text of a kernel to its instructions.
#pragma once

#include "tests/emulator/program.h"

namespace halftone::emulator {

/// Decodes program.text, which begins on this line of its file, into the rest of `program`. Throws
/// std::runtime_error naming an instruction that the emulator does not know.
void decode(Program& program, std::uint32_t first_line);

}  // namespace halftone::emulator
