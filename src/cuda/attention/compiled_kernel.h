// What a file of compiled kernels hands to the host: apart from host.h, so that kernels are not compiled anew
// when only plans change.
#pragma once

#include <utility>

namespace halftone::cuda {

/// A compiled kernel. Null when this build lacks it.
struct CompiledKernel {
  const void* function = nullptr;
  int shared_bytes = 0;
  int threads = 0;
  int cluster = 1;  ///< blocks of a worker
};

/// `kernel_of(row)` with the row as a std::integral_constant, of a table of kRows rows.
template <int kRows, class KernelOf>
CompiledKernel find_kernel(int row, const KernelOf& kernel_of) {
  return [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
    CompiledKernel found;
    ((row == kRow ? (found = kernel_of(std::integral_constant<int, kRow>{}), 0) : 0), ...);
    return found;
  }
  (std::make_integer_sequence<int, kRows>{});
}

}  // namespace halftone::cuda
