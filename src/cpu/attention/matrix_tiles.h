// Products of tiles (AMX): whether there are any.
#pragma once

namespace halftone::cpu {

struct MatrixTiles {
  bool bytes = false;  ///< of bytes
  bool pairs = false;  ///< of pairs of bf16; there is AVX-512 BF16, too
};

/// What tiles the processor multiplies and the kernel lets this process: which is asked for, the first time.
MatrixTiles matrix_tiles();

/// While one lives there are no tiles, so that tests meet what other processors do. Not beside a call that
/// runs.
class WithoutTiles {
 public:
  WithoutTiles();
  ~WithoutTiles();
  WithoutTiles(const WithoutTiles&) = delete;
  WithoutTiles& operator=(const WithoutTiles&) = delete;
};

}  // namespace halftone::cpu
