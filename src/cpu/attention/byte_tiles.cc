#include "cpu/attention/byte_tiles.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace halftone::cpu {
namespace {

#if defined(__x86_64__) && defined(__linux__)
bool find_byte_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kTiles = 1U << 24, kInt8 = 1U << 25;
  if ((edx & kTiles) == 0 || (edx & kInt8) == 0) return false;
  // Tiles are state that a process must ask for: Documentation/arch/x86/xstate.rst of the Linux kernel.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool find_byte_tiles() { return false; }
#endif

}  // namespace

bool has_byte_tiles() {
  static const bool has = find_byte_tiles();
  return has;
}

}  // namespace halftone::cpu
