// Checks of tensor arguments. They read shapes, strides and addresses, never the elements.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "halftone/types.h"

namespace halftone::planning {

inline constexpr std::int64_t kAnySize = -1;

enum class Strides : std::uint8_t {
  kContiguous,      ///< row-major without holes
  kLastContiguous,  ///< elements of the last dim are adjacent; other strides are free
};

/// What a tensor argument has to be.
struct TensorRule {
  std::string_view name;  ///< for the sentence, e.g. "cache.lengths"
  std::initializer_list<DType> dtypes;
  std::initializer_list<std::int64_t> shape;  ///< kAnySize accepts any size >= 0
  Device device;
  Strides strides = Strides::kContiguous;
};

/// Throws InvalidArgument unless `t` obeys `rule`: present (data may be null when it has no elements), rank,
/// dtype, shape, device, strides, and an address that is a multiple of the element size.
void check_tensor(const TensorView& t, const TensorRule& rule);

/// Throws InvalidArgument if `t`, which this call would ignore, is present.
void check_absent(const TensorView& t, std::string_view name, std::string_view reason);

/// Throws InvalidArgument if the bytes spanned by `out` and `in` overlap.
void check_disjoint(const TensorView& out, std::string_view out_name, const TensorView& in,
                    std::string_view in_name);

struct NamedTensor {
  const TensorView& view;
  std::string_view name;
};

/// The same for every output and input, and for every two of the outputs, of which there are at most four.
void check_disjoint(std::span<const NamedTensor> outputs, std::span<const NamedTensor> inputs);

/// Throws InvalidArgument if strides make two elements of an output share memory.
void check_no_self_overlap(const TensorView& out, std::string_view name);

/// True unless the view is default-constructed: a tensor without elements may have a null address.
inline bool given(const TensorView& t) { return t.data != nullptr || t.rank > 0; }

/// "[2, 8, 128]".
std::string shape_text(const TensorView& t);

}  // namespace halftone::planning
