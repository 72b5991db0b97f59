// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

#include "halftone/types.h"

namespace halftone {

enum class ErrorCode : int {
  kInvalidArgument = 1,    ///< a value that no configuration could accept
  kUnsupported = 2,        ///< well formed, but no backend here has it
  kOutOfRange = 3,         ///< an index, length or slot beyond its limit
  kCorruptFile = 4,        ///< a file that breaks its format
  kResourceExhausted = 5,  ///< memory, workspace or cache space is missing
  kDeviceError = 6,        ///< the device or its driver reported a failure
  kInternal = 7,           ///< a defect in halftone
};

/// "InvalidArgument", "Unsupported", ...
HALFTONE_API const char* error_code_name(ErrorCode code);

/// Thrown for every failure. what() is one sentence that names the argument, its value, the limit and the
/// remedy. User errors are thrown before any work is done: outputs are untouched.
class HALFTONE_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& sentence);
  ~Error() override;
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace halftone
