// Products of tiles of bytes (AMX): whether there are any.
#pragma once

namespace halftone::cpu {

/// Whether the processor multiplies tiles of bytes, and the kernel lets this process: which is asked for, the
/// first time.
bool has_byte_tiles();

}  // namespace halftone::cpu
