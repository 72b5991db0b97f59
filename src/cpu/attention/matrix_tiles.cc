#include "cpu/attention/matrix_tiles.h"

#include <atomic>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace halftone::cpu {
namespace {

#if defined(__x86_64__) && defined(__linux__)
MatrixTiles find_matrix_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return {};
  constexpr unsigned kPairs = 1U << 22, kTiles = 1U << 24, kBytes = 1U << 25;
  if ((edx & kTiles) == 0) return {};
  // Tiles are state that a process must ask for: Documentation/arch/x86/xstate.rst of the Linux kernel.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return {};
  return {(edx & kBytes) != 0, (edx & kPairs) != 0 && __builtin_cpu_supports("avx512bf16") != 0};
}
#else
MatrixTiles find_matrix_tiles() { return {}; }
#endif

std::atomic<int> hidden{0};  // how many WithoutTiles there are

}  // namespace

MatrixTiles matrix_tiles() {
  static const MatrixTiles found = find_matrix_tiles();
  return hidden.load(std::memory_order_relaxed) == 0 ? found : MatrixTiles{};
}

WithoutTiles::WithoutTiles() { hidden.fetch_add(1); }
WithoutTiles::~WithoutTiles() { hidden.fetch_sub(1); }

}  // namespace halftone::cpu
