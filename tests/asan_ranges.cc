// AddressSanitizer calls a general function for a vector of 32 bytes, or of 16 that may lie anywhere: tests
// of kernels would spend most of their time there. In test programs on x86-64 the linker puts these in its
// place (HalftoneTests.cmake). They let pass what is certainly good and leave all else to the original:
// nothing is checked less.
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" {
extern std::uintptr_t __asan_shadow_memory_dynamic_address;  // the shadow of address 0

void __real___asan_loadN(std::uintptr_t first, std::size_t bytes);
void __real___asan_storeN(std::uintptr_t first, std::size_t bytes);
}

namespace {

/// Whether all of the 64 bytes may be accessed that begin at `first`, rounded down to 8, and hold the others.
bool certainly_good(std::uintptr_t first, std::size_t bytes) {
  if (bytes > 64 - 7) return false;
  std::uint64_t shadow;  // a byte for each 8: 0 if all of them are good
  std::memcpy(&shadow, reinterpret_cast<const void*>((first >> 3) + __asan_shadow_memory_dynamic_address),
              sizeof shadow);
  return shadow == 0;
}

}  // namespace

extern "C" void __wrap___asan_loadN(std::uintptr_t first, std::size_t bytes) {
  if (!certainly_good(first, bytes)) __real___asan_loadN(first, bytes);
}

extern "C" void __wrap___asan_storeN(std::uintptr_t first, std::size_t bytes) {
  if (!certainly_good(first, bytes)) __real___asan_storeN(first, bytes);
}
