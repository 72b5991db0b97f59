#include "c_api/struct.h"

#include <fmt/format.h>

#include <cstdint>

namespace halftone::c_api {
namespace {

// Trivial on purpose: needs no allocation, no constructor and no destructor of a thread.
constexpr std::size_t kMessageBytes = 2048;
thread_local char last_message[kMessageBytes] = "";

struct Header {
  std::uint64_t struct_size;
  std::uint32_t abi_version;
};
static_assert(sizeof(std::size_t) == 8, "halftone supports 64-bit platforms");

[[noreturn]] void refuse(ErrorCode code, const std::string& sentence) { throw Error(code, sentence); }

}  // namespace

halftone_status fail(halftone_status status, std::string_view sentence) noexcept {
  constexpr std::string_view kCut = "...";
  if (sentence.size() < kMessageBytes) {
    std::memcpy(last_message, sentence.data(), sentence.size());
    last_message[sentence.size()] = '\0';
    return status;
  }
  std::size_t kept = kMessageBytes - 1 - kCut.size();
  while (kept > 0 && (static_cast<unsigned char>(sentence[kept]) & 0xc0u) == 0x80u)
    --kept;  // whole UTF-8 characters
  std::memcpy(last_message, sentence.data(), kept);
  std::memcpy(last_message + kept, kCut.data(), kCut.size());
  last_message[kept + kCut.size()] = '\0';
  return status;
}

std::string Name::text() const {
  return parent == nullptr ? std::string(leaf) : fmt::format("{}.{}", parent->text(), leaf);
}

void check_size(const void* out, std::size_t struct_size, const StructRule& rule, const Name& argument) {
  if (out == nullptr) {
    refuse(ErrorCode::kInvalidArgument,
           fmt::format("{} is NULL, but must point to a {}: pass its address.", argument.text(), rule.name));
  }
  if (struct_size < rule.required || struct_size > kLargestStruct || struct_size % 8 != 0) {
    refuse(ErrorCode::kInvalidArgument,
           fmt::format(
               "{}.struct_size is {}, but must be a multiple of 8 from {} to {}: use sizeof({}), as its init "
               "function sets it.",
               argument.text(), struct_size, rule.required, kLargestStruct, rule.name));
  }
}

std::size_t check_header(const void* in, const StructRule& rule, const Name& argument) {
  Header header{};
  if (in != nullptr) std::memcpy(&header, in, sizeof header.struct_size + sizeof header.abi_version);
  check_size(in, header.struct_size, rule, argument);
  if (header.abi_version != HALFTONE_ABI_VERSION) {
    refuse(
        header.abi_version == 0 ? ErrorCode::kInvalidArgument : ErrorCode::kUnsupported,
        fmt::format(
            "{}.abi_version is {}, but this library understands {}: use HALFTONE_ABI_VERSION of the header "
            "that belongs to it.",
            argument.text(), header.abi_version, HALFTONE_ABI_VERSION));
  }
  return header.struct_size;
}

std::size_t check_input(const void* in, const StructRule& rule, const Name& argument) {
  const std::size_t struct_size = check_header(in, rule, argument);
  const auto* bytes = static_cast<const unsigned char*>(in);
  for (std::size_t i = rule.known; i < struct_size; ++i) {
    if (bytes[i] != 0) {
      refuse(
          ErrorCode::kUnsupported,
          fmt::format(
              "{}.struct_size is {} and byte {} is {}, but this library's {} ends after {} bytes: leave the "
              "newer field zero or use a newer library.",
              argument.text(), struct_size, i, bytes[i], rule.name, rule.known));
    }
  }
  return std::min(struct_size, rule.known);
}

}  // namespace halftone::c_api

extern "C" const char* halftone_last_error(void) { return halftone::c_api::last_message; }
