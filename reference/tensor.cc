#include "reference/tensor.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "reference/arrays.h"
#include "reference/sanitizer.h"

#ifdef HALFTONE_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace halftone::reference {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kGuard = 512;  // bytes on each side; a multiple of kAlignment

/// NaN as f32, f16, bf16 and e4m3, negative as an integer, and not what a stray 0xFF or 0x00 store leaves.
std::uint8_t guard_byte(std::size_t i) { return i % 4 == 2 ? 0xC1 : 0xFF; }

/// With AddressSanitizer a guard region also traps on reads.
void protect([[maybe_unused]] const std::uint8_t* begin, [[maybe_unused]] std::size_t bytes) {
#ifdef HALFTONE_ASAN
  __asan_poison_memory_region(begin, bytes);
#endif
}

/// First byte of [begin, end) that is not the guard pattern, or end. Reads protected memory.
__attribute__((no_sanitize("address"))) std::size_t first_change(const std::uint8_t* memory,
                                                                 std::size_t begin, std::size_t end) {
  while (begin < end && memory[begin] == guard_byte(begin)) ++begin;
  return begin;
}

}  // namespace

void Tensor::Free::operator()(std::uint8_t* p) const { ::operator delete (p, std::align_val_t{kAlignment}); }

Tensor::Tensor(DType dtype, std::vector<std::int64_t> shape, std::size_t misalignment)
    : dtype_(dtype), shape_(std::move(shape)), offset_(kGuard + misalignment) {
  size_ = static_cast<std::size_t>(numel()) * static_cast<std::size_t>(dtype_bits(dtype)) / 8;
  total_ = size_ + 2 * kGuard + misalignment;
  memory_.reset(static_cast<std::uint8_t*>(::operator new (total_, std::align_val_t{kAlignment})));
  for (std::size_t i = 0; i < offset_; ++i) memory_.get()[i] = guard_byte(i);
  for (std::size_t i = offset_ + size_; i < total_; ++i) memory_.get()[i] = guard_byte(i);
  fill_bytes(0xFF);
  protect(memory_.get(), offset_);
  protect(memory_.get() + offset_ + size_, total_ - offset_ - size_);
}

Tensor Tensor::of(DType dtype, std::vector<std::int64_t> shape, std::span<const float> values) {
  Tensor t(dtype, std::move(shape));
  const auto count = static_cast<std::size_t>(t.numel());
  if (dtype == DType::kFloat32) {
    std::copy_n(values.begin(), count, t.as<float>().begin());
  } else {
    loops::to_bits16(dtype, values.data(), count, t.as<std::uint16_t>().data());
  }
  return t;
}

Tensor Tensor::of(std::vector<std::int64_t> shape, std::span<const std::int32_t> values) {
  Tensor t(DType::kInt32, std::move(shape));
  std::copy_n(values.begin(), t.numel(), t.as<std::int32_t>().begin());
  return t;
}

Tensor Tensor::of(std::vector<std::int64_t> shape, std::span<const std::int64_t> values) {
  Tensor t(DType::kInt64, std::move(shape));
  std::copy_n(values.begin(), t.numel(), t.as<std::int64_t>().begin());
  return t;
}

Tensor Tensor::clone() const {
  if (!present()) return {};
  Tensor t(dtype_, shape_, offset_ - kGuard);
  if (size_ > 0) std::memcpy(t.bytes().data(), bytes().data(), size_);
  return t;
}

std::int64_t Tensor::numel() const {
  std::int64_t n = 1;
  for (const std::int64_t d : shape_) n *= d;
  return n;
}

TensorView Tensor::view() const {
  TensorView v;
  if (!present()) return v;
  v.data = memory_.get() + offset_;
  v.dtype = dtype_;
  v.rank = static_cast<int>(shape_.size());
  std::int64_t stride = 1;
  for (int i = v.rank - 1; i >= 0; --i) {
    const auto axis = static_cast<std::size_t>(i);
    v.shape[axis] = shape_[axis];
    v.strides[axis] = stride;
    stride *= shape_[axis];
  }
  return v;
}

float Tensor::get(std::int64_t i) const {
  const auto index = static_cast<std::size_t>(i);
  if (dtype_ == DType::kFloat32) return as<float>()[index];
  return from_bits16(dtype_, as<std::uint16_t>()[index]);
}

void Tensor::set(std::int64_t i, float x) const {
  const auto index = static_cast<std::size_t>(i);
  if (dtype_ == DType::kFloat32) {
    as<float>()[index] = x;
  } else {
    as<std::uint16_t>()[index] = to_bits16(dtype_, x);
  }
}

std::vector<float> Tensor::to_floats() const {
  std::vector<float> values(static_cast<std::size_t>(numel()));
  if (dtype_ == DType::kFloat32) {
    std::copy_n(as<float>().begin(), values.size(), values.begin());
  } else {
    loops::from_bits16(dtype_, as<std::uint16_t>().data(), values.size(), values.data());
  }
  return values;
}

void Tensor::fill_bytes(std::uint8_t byte) const {
  if (size_ > 0) std::memset(bytes().data(), byte, size_);
}

bool Tensor::guards_intact() const {
  const std::size_t end = offset_ + size_;
  return !present() || (first_change(memory_.get(), 0, offset_) == offset_ &&
                        first_change(memory_.get(), end, total_) == total_);
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.bytes().size() == b.bytes().size() &&
         (a.bytes().empty() || std::memcmp(a.bytes().data(), b.bytes().data(), a.bytes().size()) == 0);
}

}  // namespace halftone::reference
