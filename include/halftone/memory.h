// Host memory that is aligned as pages and workspaces must be.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "halftone/types.h"

namespace halftone {

/// Zeroed host memory for the pages of a cache or for a workspace. It starts at a multiple of 256 bytes,
/// which a workspace needs (pages need 16). On CUDA use cudaMalloc() or an allocator of yours on top of it:
/// its memory starts at a multiple of 256 bytes as well.
class HALFTONE_API AlignedBuffer {
 public:
  static constexpr int kAlignment = 256;

  AlignedBuffer() = default;
  /// Throws InvalidArgument on a negative size and ResourceExhausted where memory is missing.
  explicit AlignedBuffer(std::int64_t bytes);

  std::uint8_t* data() const { return memory_.get(); }
  std::int64_t size() const { return size_; }

  /// All of it, uint8 [size()]: a workspace.
  TensorView view() const;
  /// Its beginning as uint8 of `shape`, such as {num_pages, page_bytes}. Throws OutOfRange if it is smaller.
  TensorView view(std::initializer_list<std::int64_t> shape) const;

 private:
  struct Free {
    void operator()(std::uint8_t* memory) const noexcept;
  };
  std::unique_ptr<std::uint8_t, Free> memory_;
  std::int64_t size_ = 0;
};

}  // namespace halftone
