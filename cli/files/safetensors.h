// safetensors files: a reader that trusts nothing and an atomic writer.
//
// Format (huggingface.co/docs/safetensors): 8 bytes little-endian header length N, N bytes of JSON
// {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, "__metadata__": {"key": "text"}},
// then the data; the spans tile the data without holes or overlaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cli/files/atomic_file.h"
#include "halftone/types.h"

namespace halftone::cli {

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  ///< the format's own limit
inline constexpr std::size_t kMaxHeaderEntries = 1'000'000;    ///< tensors plus metadata entries
inline constexpr std::size_t kMaxTensorRank = 16;

struct TensorInfo {
  std::string name;
  std::string dtype_text;      ///< as in the file: "BF16", "F64", ...
  std::optional<DType> dtype;  ///< absent when halftone cannot hold it (F64, U16, BOOL, ...)
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< bytes from the start of the data
  std::uint64_t end = 0;

  std::uint64_t bytes() const { return end - begin; }
  std::string shape_text() const;  ///< "[1024, 8, 128]"
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  ///< in the order of their data
  std::map<std::string, std::string> metadata;
};

/// Parses and checks a header against the size of the data that follows it. `file` is named in the sentences.
/// Throws CorruptFile: bad JSON or UTF-8, duplicate keys, unknown dtype, wrong nesting, a shape that wraps or
/// does not match its span, spans that are reversed, overlap, leave holes or do not end with the data.
SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           std::string_view file);

/// Reads tensors on demand; holds only the header in memory.
class SafetensorsReader {
 public:
  /// Throws InvalidArgument (missing, unreadable, not a regular file) or CorruptFile, each before it
  /// allocates anything that depends on an unchecked number.
  explicit SafetensorsReader(std::string path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const TensorInfo* find(const std::string& name) const;

  /// Reads bytes [offset, offset + out.size()) of a tensor. Throws OutOfRange, or CorruptFile when the file
  /// shrank.
  void read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> out) const;
  std::vector<std::byte> read(const TensorInfo& tensor) const;

 private:
  void read_at(std::uint64_t position, std::span<std::byte> out) const;

  std::string path_;
  int fd_ = -1;
  std::uint64_t data_start_ = 0;
  SafetensorsHeader header_;
  std::unordered_map<std::string, std::size_t> index_;
};

/// A tensor to be written.
struct TensorDeclaration {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
};

/// Writes the header at once, then the data in the order of the declarations, piece by piece.
class SafetensorsWriter {
 public:
  /// Throws InvalidArgument on duplicate names, kInt4 or a shape that wraps.
  SafetensorsWriter(std::string path, const std::vector<TensorDeclaration>& tensors,
                    const std::map<std::string, std::string>& metadata);
  void write(std::span<const std::byte> bytes);
  /// Makes the file appear. Throws Internal unless exactly the declared bytes were written.
  void commit();

 private:
  AtomicFile file_;
  std::uint64_t remaining_ = 0;
};

}  // namespace halftone::cli
