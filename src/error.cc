#include "halftone/error.h"

namespace halftone {

const char* error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "InvalidArgument";
    case ErrorCode::kUnsupported:
      return "Unsupported";
    case ErrorCode::kOutOfRange:
      return "OutOfRange";
    case ErrorCode::kCorruptFile:
      return "CorruptFile";
    case ErrorCode::kResourceExhausted:
      return "ResourceExhausted";
    case ErrorCode::kDeviceError:
      return "DeviceError";
    case ErrorCode::kInternal:
      return "Internal";
  }
  return "Unknown";
}

Error::Error(ErrorCode code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}

Error::~Error() = default;

}  // namespace halftone
