// What code compiled with the headers of a newer glibc asks for, and glibc 2.28 does not have. All of it
// stays inside the library (exports.map).
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

extern "C" {

// 2.32: libstdc++ counts references without atomics as long as it is true.
char __libc_single_threaded = 0;

// 2.33; before, <sys/stat.h> made them of calls of other names. The kernel's struct stat is glibc's on 64-bit
// machines.
int stat(const char* path, struct stat* out) noexcept {
  return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, out, 0));
}
int lstat(const char* path, struct stat* out) noexcept {
  return static_cast<int>(syscall(SYS_newfstatat, AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW));
}
int fstat(int file, struct stat* out) noexcept { return static_cast<int>(syscall(SYS_fstat, file, out)); }
int fstat64(int file, struct stat64* out) noexcept { return static_cast<int>(syscall(SYS_fstat, file, out)); }

// 2.36, for std::random_device.
std::uint32_t arc4random() noexcept {
  std::uint32_t bits = 0;
  while (getrandom(&bits, sizeof bits, 0) !=
         sizeof bits) {  // a few bytes come whole, or with EINTR not at all
    if (errno != EINTR) std::abort();
  }
  return bits;
}

}  // extern "C"
