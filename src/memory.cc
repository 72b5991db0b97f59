#include "halftone/memory.h"

#include <fmt/format.h>

#include <cstring>
#include <new>

#include "halftone/error.h"

namespace halftone {

AlignedBuffer::AlignedBuffer(std::int64_t bytes) {
  if (bytes < 0) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("bytes is {}, but must be 0 or more: give a size.", bytes));
  }
  // At least one byte: a view without an address would count as absent.
  const auto size = static_cast<std::size_t>(bytes == 0 ? 1 : bytes);
  memory_.reset(
      static_cast<std::uint8_t*>(::operator new (size, std::align_val_t{kAlignment}, std::nothrow)));
  if (memory_ == nullptr) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("bytes is {}, but host memory does not hold as many: make fewer pages, or lower "
                            "the bounds of the plan.",
                            bytes));
  }
  std::memset(memory_.get(), 0, size);
  size_ = bytes;
}

void AlignedBuffer::Free::operator()(std::uint8_t* memory) const noexcept {
  ::operator delete (memory, std::align_val_t{kAlignment});
}

TensorView AlignedBuffer::view() const { return view({size_}); }

TensorView AlignedBuffer::view(std::initializer_list<std::int64_t> shape) const {
  const TensorView view = TensorView::contiguous(memory_.get(), DType::kUInt8, shape);
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("shape has extent {}, but must have none below 0: give a count.", extent));
    }
    if (__builtin_mul_overflow(elements, extent, &elements)) elements = INT64_MAX;
  }
  if (elements > size_) {
    throw Error(ErrorCode::kOutOfRange,
                fmt::format("shape takes {} bytes, but the buffer has {}: make a buffer of as many.",
                            elements == INT64_MAX ? "too many" : fmt::to_string(elements), size_));
  }
  return view;
}

}  // namespace halftone
