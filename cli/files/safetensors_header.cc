// The header of a safetensors file: an event-driven parser, because a document tree would drop duplicate keys
// silently and would be built before its size is known to be sane.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "cli/files/safetensors.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

struct FileDType {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};

constexpr FileDType kFileDTypes[] = {
    {"F32", 32, DType::kFloat32},
    {"F16", 16, DType::kFloat16},
    {"BF16", 16, DType::kBFloat16},
    {"F8_E4M3", 8, DType::kFloat8E4M3},
    {"I8", 8, DType::kInt8},
    {"U8", 8, DType::kUInt8},
    {"I32", 32, DType::kInt32},
    {"I64", 64, DType::kInt64},
    {"F64", 64, {}},
    {"BOOL", 8, {}},
    {"I16", 16, {}},
    {"U16", 16, {}},
    {"U32", 32, {}},
    {"U64", 64, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},
    {"C64", 64, {}},
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
};

const FileDType* find_dtype(std::string_view name) {
  const auto* found = std::find_if(std::begin(kFileDTypes), std::end(kFileDTypes),
                                   [&](const FileDType& d) { return d.name == name; });
  return found == std::end(kFileDTypes) ? nullptr : found;
}

class HeaderHandler {
 public:
  using Json = nlohmann::json;

  HeaderHandler(std::string_view file, SafetensorsHeader& header) : file_(file), header_(header) {}

  bool start_object(std::size_t) {
    switch (state_) {
      case State::kStart:
        state_ = State::kRoot;
        return true;
      case State::kRoot:
        if (key_ == "__metadata__") {
          state_ = State::kMetadata;
        } else {
          state_ = State::kTensor;
          has_dtype_ = has_shape_ = has_offsets_ = false;
          header_.tensors.emplace_back().name = key_;
        }
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool key(std::string& text) {
    key_ = text;
    if (state_ == State::kTensor) return true;  // duplicates are found by their has_ flags
    if (++entries_ > kMaxHeaderEntries) {
      corrupt(fmt::format("has more than {} entries: split it", kMaxHeaderEntries));
    }
    const bool fresh =
        state_ == State::kRoot ? names_.insert(text).second : header_.metadata.try_emplace(text).second;
    if (!fresh) corrupt(fmt::format("has the key '{}' twice", printable(text)));
    return true;
  }

  bool end_object() {
    if (state_ == State::kTensor && !(has_dtype_ && has_shape_ && has_offsets_)) {
      corrupt(fmt::format("lacks {} of tensor '{}'",
                          !has_dtype_   ? "dtype"
                          : !has_shape_ ? "shape"
                                        : "data_offsets",
                          tensor_name()));
    }
    state_ = state_ == State::kRoot ? State::kEnd : State::kRoot;
    return true;
  }

  bool start_array(std::size_t) {
    if (state_ != State::kTensor) return unexpected("an array");
    if (key_ == "shape") {
      once(has_shape_);
      state_ = State::kShape;
    } else if (key_ == "data_offsets") {
      once(has_offsets_);
      state_ = State::kOffsets;
      offsets_ = 0;
    } else {
      return unexpected("an array");
    }
    return true;
  }

  bool end_array() {
    if (state_ == State::kOffsets && offsets_ != 2) {
      corrupt(fmt::format("gives {} data_offsets for tensor '{}', but must give 2", offsets_, tensor_name()));
    }
    state_ = State::kTensor;
    return true;
  }

  bool string(std::string& text) {
    if (state_ == State::kMetadata) {
      header_.metadata[key_] = std::move(text);
      return true;
    }
    if (state_ != State::kTensor || key_ != "dtype") return unexpected("a string");
    once(has_dtype_);
    const FileDType* dtype = find_dtype(text);
    if (dtype == nullptr) {
      corrupt(fmt::format("gives tensor '{}' the unknown dtype '{}'", tensor_name(), printable(text)));
    }
    header_.tensors.back().dtype_text = dtype->name;
    header_.tensors.back().dtype = dtype->dtype;
    return true;
  }

  bool number_unsigned(std::uint64_t value) {
    if (state_ == State::kShape) {
      TensorInfo& tensor = header_.tensors.back();
      if (tensor.shape.size() == kMaxTensorRank) {
        corrupt(fmt::format("gives tensor '{}' more than {} dimensions", tensor_name(), kMaxTensorRank));
      }
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        corrupt(fmt::format("gives tensor '{}' the dimension {}, beyond 2^63 - 1", tensor_name(), value));
      }
      tensor.shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (state_ == State::kOffsets) {
      TensorInfo& tensor = header_.tensors.back();
      (offsets_ == 0 ? tensor.begin : tensor.end) = value;
      if (++offsets_ > 2)
        corrupt(fmt::format("gives more than 2 data_offsets for tensor '{}'", tensor_name()));
      return true;
    }
    return unexpected("a number");
  }

  bool number_integer(std::int64_t value) { return unexpected(fmt::format("the negative number {}", value)); }
  bool number_float(double, const std::string& text) {
    return unexpected(fmt::format("the number {}, which is no 64-bit unsigned integer", printable(text, 40)));
  }
  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("true or false"); }
  bool binary(Json::binary_t&) { return unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) {
    corrupt(fmt::format("is not valid UTF-8 JSON near byte {}", position + 8));
  }

 private:
  enum class State { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };

  [[noreturn]] void corrupt(const std::string& what) const {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("file '{}': its header {}: write it again.", printable(file_), what));
  }
  bool unexpected(const std::string& what) const {
    corrupt(fmt::format("has {} where none may be{}", what,
                        key_.empty() ? "" : fmt::format(" (at key '{}')", printable(key_))));
  }
  void once(bool& seen) {
    if (seen) corrupt(fmt::format("gives {} of tensor '{}' twice", key_, tensor_name()));
    seen = true;
  }
  std::string tensor_name() const { return printable(header_.tensors.back().name); }

  std::string_view file_;
  SafetensorsHeader& header_;
  State state_ = State::kStart;
  std::string key_;
  std::unordered_set<std::string> names_;
  std::size_t entries_ = 0;
  int offsets_ = 0;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
};

[[noreturn]] void corrupt_tensor(std::string_view file, const TensorInfo& tensor, const std::string& what) {
  throw Error(ErrorCode::kCorruptFile, fmt::format("file '{}': tensor '{}' {}: write the file again.",
                                                   printable(file), printable(tensor.name), what));
}

void check_tensor(std::string_view file, const TensorInfo& tensor, std::uint64_t data_bytes) {
  if (tensor.begin > tensor.end) {
    corrupt_tensor(file, tensor,
                   fmt::format("ends at byte {} before it begins at {}", tensor.end, tensor.begin));
  }
  if (tensor.end > data_bytes) {
    corrupt_tensor(file, tensor,
                   fmt::format("ends at byte {}, but the file has {} bytes of data", tensor.end, data_bytes));
  }
  std::uint64_t bits = static_cast<std::uint64_t>(find_dtype(tensor.dtype_text)->bits);
  for (const std::int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(extent), &bits)) {
      corrupt_tensor(file, tensor,
                     fmt::format("has shape {}, whose size exceeds 64 bits", tensor.shape_text()));
    }
  }
  if (bits % 8 != 0 || bits / 8 != tensor.bytes()) {
    corrupt_tensor(file, tensor,
                   fmt::format("has {} bytes, but shape {} of {} needs {}", tensor.bytes(),
                               tensor.shape_text(), tensor.dtype_text, bits / 8));
  }
}

}  // namespace

std::string TensorInfo::shape_text() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                           std::string_view file) {
  SafetensorsHeader header;
  HeaderHandler handler(file, header);
  nlohmann::json::sax_parse(json.begin(), json.end(), &handler);
  std::sort(header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t covered = 0;
  for (const TensorInfo& tensor : header.tensors) {
    check_tensor(file, tensor, data_bytes);
    if (tensor.begin != covered) {
      corrupt_tensor(
          file, tensor,
          fmt::format("begins at byte {}, which {}", tensor.begin,
                      tensor.begin < covered ? "overlaps another tensor" : "leaves a hole before it"));
    }
    covered = tensor.end;
  }
  if (covered != data_bytes) {
    throw Error(ErrorCode::kCorruptFile,
                fmt::format("file '{}': {} bytes follow its last tensor: write the file again.",
                            printable(file), data_bytes - covered));
  }
  return header;
}

}  // namespace halftone::cli
