// ThreadSanitizer leaves arrays.cc, normals.cc and row_block.cc uninstrumented (CMakeLists.txt): tests spend
// most of their time in these loops, which start no threads. Nothing is lost: each function tells it what
// memory it reads and writes that another thread may have, by range in place of by element.
//
// They work on plain arrays. What they call of the standard library must be inlined: were it a function of
// its own, the linker might give it to instrumented sources, too.
#pragma once

#include <cstddef>

#ifdef HALFTONE_TELLS_RANGES
extern "C" void __tsan_read_range(void* first, std::size_t bytes);
extern "C" void __tsan_write_range(void* first, std::size_t bytes);
#endif

namespace halftone::reference::loops {

template <class T>
void reads([[maybe_unused]] const T* first, [[maybe_unused]] std::size_t count) {
#ifdef HALFTONE_TELLS_RANGES
  if (count > 0) __tsan_read_range(const_cast<T*>(first), count * sizeof(T));
#endif
}

template <class T>
void writes([[maybe_unused]] T* first, [[maybe_unused]] std::size_t count) {
#ifdef HALFTONE_TELLS_RANGES
  if (count > 0) __tsan_write_range(first, count * sizeof(T));
#endif
}

}  // namespace halftone::reference::loops
