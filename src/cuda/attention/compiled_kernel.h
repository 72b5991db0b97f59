// What a file of compiled kernels hands to the host: apart from host.h, so that kernels are not compiled anew
// when only plans change.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

namespace halftone::cuda {

/// A compiled kernel. Null when this build lacks it.
struct CompiledKernel {
  const void* function = nullptr;
  int shared_bytes = 0;
  int threads = 0;
  int cluster = 1;  ///< blocks of a worker
};

/// `kernel_of(row)` with the row of kTable as a std::integral_constant, null where Wanted{} does not want the
/// row's configuration: of these nothing is instantiated, and host compilers take seconds for hundreds of
/// branches.
template <const auto& kTable, class Wanted, class KernelOf>
CompiledKernel find_kernel(int row, Wanted /*wanted*/, KernelOf kernel_of) {
  static constexpr int kCount = static_cast<int>(std::count_if(kTable.begin(), kTable.end(), Wanted{}));
  [[maybe_unused]] static constexpr auto kRows = [] {  // of no rows no use
    std::array<int, kCount> rows{};
    for (int i = 0, found = 0; found < kCount; ++i) {
      if (Wanted{}(kTable[i])) rows[found++] = i;
    }
    return rows;
  }();
  return [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    CompiledKernel found;
    ((row == kRows[kIndex] ? (found = kernel_of(std::integral_constant<int, kRows[kIndex]>{}), 0) : 0), ...);
    return found;
  }
  (std::make_integer_sequence<int, kCount>{});
}

}  // namespace halftone::cuda
