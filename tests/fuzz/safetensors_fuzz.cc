// The safetensors reader: the bytes are a file.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "cli/files/safetensors.h"
#include "fuzz_input.h"

namespace {

using namespace halftone;
using fuzz::require;

/// What the header promises, checked against the size of the data.
void check_header(const std::vector<cli::TensorInfo>& tensors, std::uint64_t data_bytes) {
  std::uint64_t at = 0;
  for (const cli::TensorInfo& t : tensors) {
    require(t.begin == at && t.end >= t.begin, "spans tile the data in order");
    at = t.end;
    std::uint64_t elements = 1;
    for (const std::int64_t extent : t.shape) {
      require(extent >= 0, "extents are not negative");
      elements *= static_cast<std::uint64_t>(extent);
    }
    if (t.dtype) require(elements * dtype_bits(*t.dtype) / 8 == t.bytes(), "the shape fills the span");
    require(!t.shape_text().empty(), "a shape can be printed");
  }
  require(at == data_bytes, "the last span ends with the data");
}

/// A file in memory that has a path.
class MemoryFile {
 public:
  MemoryFile(const std::uint8_t* data, std::size_t size)
      : fd_(::memfd_create("safetensors_fuzz", MFD_CLOEXEC)) {
    require(fd_ >= 0, "a memory file can be made");
    for (std::size_t at = 0; at < size;) {
      const ssize_t n = ::write(fd_, data + at, size - at);
      require(n > 0, "a memory file can be written");
      at += static_cast<std::size_t>(n);
    }
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

void read_file(const std::uint8_t* data, std::size_t size) {
  const MemoryFile file(data, size);
  const cli::SafetensorsReader reader(file.path());
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, data, sizeof header_bytes);
  const std::uint64_t start = sizeof header_bytes + header_bytes;
  require(start <= size, "the header lies within the file");
  check_header(reader.tensors(), size - start);
  for (const cli::TensorInfo& t : reader.tensors()) {
    require(reader.find(t.name) == &t, "a tensor is found by its name");
    const std::vector<std::byte> bytes = reader.read(t);
    const std::span file_bytes(reinterpret_cast<const std::byte*>(data) + start + t.begin, t.bytes());
    require(std::ranges::equal(bytes, file_bytes), "reading gives the file's bytes");
    require(!fuzz::accepted([&] { reader.read(t, t.bytes() + 1, {}); }), "a read beyond a tensor is refused");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::accepted([&] { read_file(data, size); });
  if (size < 8) return 0;
  // The same bytes as a header of their own, with any size of the data behind it.
  std::uint64_t data_bytes = 0;
  std::memcpy(&data_bytes, data, sizeof data_bytes);
  const std::string_view json(reinterpret_cast<const char*>(data) + 8, size - 8);
  fuzz::accepted(
      [&] { check_header(cli::parse_safetensors_header(json, data_bytes, "fuzz").tensors, data_bytes); });
  return 0;
}
