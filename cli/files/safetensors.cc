#include "cli/files/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

std::string_view file_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kFloat16:
      return "F16";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat8E4M3:
      return "F8_E4M3";
    case DType::kInt8:
      return "I8";
    case DType::kUInt8:
      return "U8";
    case DType::kInt32:
      return "I32";
    case DType::kInt64:
      return "I64";
    case DType::kInt4:
    case DType::kFloat8E8M0:
      break;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("dtype is {}, which safetensors files cannot hold: store bytes as uint8.",
                          dtype_name(dtype)));
}

std::uint64_t read_le64(const std::array<std::byte, 8>& bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i)
    value = value << 8 | static_cast<std::uint64_t>(bytes[static_cast<std::size_t>(i)]);
  return value;
}

[[noreturn]] void corrupt(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile, fmt::format("file '{}' {}.", printable(path), what));
}

}  // namespace

SafetensorsReader::SafetensorsReader(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: opening a FIFO for reading must not wait for a writer.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd_ < 0) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("file '{}' cannot be opened ({}): check the name.",
                                                         printable(path_), ::strerror(errno)));
  }
  try {
    struct stat status {};
    if (::fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("file '{}' is {}, but must be a regular file: name a .safetensors file.",
                              printable(path_),
                              S_ISDIR(status.st_mode) ? "a directory" : "a FIFO, socket or device"));
    }
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (size < 8) {
      corrupt(path_,
              fmt::format("has {} bytes, but a safetensors file has at least 10: it is cut short", size));
    }
    std::array<std::byte, 8> prefix{};
    read_at(0, prefix);
    const std::uint64_t length = read_le64(prefix);
    if (length > kMaxHeaderBytes) {
      corrupt(path_,
              fmt::format("states a header of {} bytes, but the limit is {}: is it a safetensors file?",
                          length, kMaxHeaderBytes));
    }
    if (length > size - 8) {
      corrupt(path_, fmt::format("states a header of {} bytes, but only {} follow: it is cut short", length,
                                 size - 8));
    }
    std::string json(length, '\0');
    read_at(8, std::as_writable_bytes(std::span(json)));
    data_start_ = 8 + length;
    header_ = parse_safetensors_header(json, size - data_start_, path_);
    index_.reserve(header_.tensors.size());
    for (std::size_t i = 0; i < header_.tensors.size(); ++i) index_.emplace(header_.tensors[i].name, i);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

SafetensorsReader::~SafetensorsReader() { ::close(fd_); }

const TensorInfo* SafetensorsReader::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.tensors[found->second];
}

void SafetensorsReader::read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> out) const {
  if (offset > tensor.bytes() || out.size() > tensor.bytes() - offset) {
    throw Error(ErrorCode::kOutOfRange,
                fmt::format("offset {} plus {} bytes is beyond tensor '{}' of {} bytes: read less.", offset,
                            out.size(), printable(tensor.name), tensor.bytes()));
  }
  read_at(data_start_ + tensor.begin + offset, out);
}

std::vector<std::byte> SafetensorsReader::read(const TensorInfo& tensor) const {
  std::vector<std::byte> bytes(tensor.bytes());
  read(tensor, 0, bytes);
  return bytes;
}

void SafetensorsReader::read_at(std::uint64_t position, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(position));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) corrupt(path_, fmt::format("cannot be read at byte {} ({})", position, ::strerror(errno)));
    if (n == 0)
      corrupt(path_, fmt::format("ends at byte {}, before its data does: it is cut short", position));
    out = out.subspan(static_cast<std::size_t>(n));
    position += static_cast<std::uint64_t>(n);
  }
}

SafetensorsWriter::SafetensorsWriter(std::string path, const std::vector<TensorDeclaration>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(std::move(path)) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::unordered_set<std::string> names = {"__metadata__"};
  for (const TensorDeclaration& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("tensor name '{}' is taken: use each name once.", printable(tensor.name)));
    }
    std::uint64_t bytes = static_cast<std::uint64_t>(dtype_bits(tensor.dtype)) / 8;
    for (const std::int64_t extent : tensor.shape) {
      if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes)) {
        throw Error(
            ErrorCode::kInvalidArgument,
            fmt::format("shape of tensor '{}' has the extent {}, beyond what 64 bits can size: use less.",
                        printable(tensor.name), extent));
      }
    }
    header[tensor.name] = {{"dtype", file_dtype(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {remaining_, remaining_ + bytes}}};
    remaining_ += bytes;
  }
  std::string json;
  try {
    json = header.dump();
  } catch (const nlohmann::json::type_error&) {
    throw Error(ErrorCode::kInvalidArgument,
                "a tensor name or metadata text is not UTF-8: encode it as UTF-8.");
  }
  json.resize((json.size() + 7) / 8 * 8, ' ');  // the data then starts 8-byte aligned
  std::array<std::byte, 8> prefix{};
  for (std::size_t i = 0; i < 8; ++i) prefix[i] = static_cast<std::byte>(json.size() >> (8 * i));
  file_.write(prefix);
  file_.write(json);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() > remaining_) {
    throw Error(ErrorCode::kInternal,
                fmt::format("{} bytes written, but only {} were declared: a defect in halftone.",
                            bytes.size(), remaining_));
  }
  remaining_ -= bytes.size();
  file_.write(bytes);
}

void SafetensorsWriter::commit() {
  if (remaining_ != 0) {
    throw Error(ErrorCode::kInternal,
                fmt::format("{} declared bytes were not written: a defect in halftone.", remaining_));
  }
  file_.commit();
}

}  // namespace halftone::cli
