// A tensor that owns its memory, with guard regions on both sides: writes outside it are found by
// guards_intact(), and values read outside it are NaN in every floating-point format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "halftone/types.h"

namespace halftone::reference {

class Tensor {
 public:
  /// Absent: view().present() is false.
  Tensor() = default;

  /// Uninitialised elements are bytes 0xFF (NaN, or -1). `data` is 256-byte aligned plus `misalignment`
  /// bytes.
  Tensor(DType dtype, std::vector<std::int64_t> shape, std::size_t misalignment = 0);

  /// Copies; `values` are rounded to `dtype` (kFloat32, kFloat16, kBFloat16).
  static Tensor of(DType dtype, std::vector<std::int64_t> shape, std::span<const float> values);
  static Tensor of(std::vector<std::int64_t> shape, std::span<const std::int32_t> values);
  static Tensor of(std::vector<std::int64_t> shape, std::span<const std::int64_t> values);

  Tensor clone() const;
  bool present() const { return memory_ != nullptr; }
  DType dtype() const { return dtype_; }
  std::int64_t numel() const;
  const std::vector<std::int64_t>& shape() const { return shape_; }

  /// Row-major view of the whole tensor.
  TensorView view() const;

  std::span<std::uint8_t> bytes() const { return {memory_.get() + offset_, size_}; }
  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(memory_.get() + offset_), size_ / sizeof(T)};
  }

  /// Element access for kFloat32, kFloat16 and kBFloat16.
  float get(std::int64_t i) const;
  void set(std::int64_t i, float x) const;
  std::vector<float> to_floats() const;

  void fill_bytes(std::uint8_t byte) const;
  bool guards_intact() const;

 private:
  struct Free {
    void operator()(std::uint8_t* p) const;
  };
  DType dtype_ = DType::kFloat32;
  std::vector<std::int64_t> shape_;
  std::unique_ptr<std::uint8_t, Free> memory_;
  std::size_t offset_ = 0;  // of the first element
  std::size_t size_ = 0;    // bytes
  std::size_t total_ = 0;   // bytes with guards
};

/// Same bytes, NaN payloads included.
bool same_bytes(const Tensor& a, const Tensor& b);

/// Bit patterns of 16-bit floats.
std::uint16_t to_bits16(DType dtype, float x);
float from_bits16(DType dtype, std::uint16_t bits);

}  // namespace halftone::reference
