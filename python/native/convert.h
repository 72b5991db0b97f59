// From what Python passes (DLPack tensors, None, numbers) to the library's vocabulary, and from its errors to
// Python's. Every conversion names the argument in its error.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <exception>
#include <string_view>
#include <utility>

#include "cpu/interrupt.h"
#include "halftone/attention.h"
#include "halftone/error.h"

namespace halftone::python {

namespace ffi = ::tvm::ffi;

/// The view of a tensor argument. Throws InvalidArgument for anything else (None included), for an element
/// type that the library does not know and for more than TensorView::kMaxRank dims; Unsupported for a device
/// that is neither the CPU nor CUDA.
TensorView to_view(ffi::AnyView value, std::string_view name);

/// As to_view; None is an absent view.
TensorView to_optional_view(ffi::AnyView value, std::string_view name);

/// A cache of `spec` in the caller's arrays; all but `pages` may be None. See to_view for the errors.
PagedKv to_cache(const KvCacheSpec& spec, ffi::AnyView pages, ffi::AnyView block_table, ffi::AnyView lengths,
                 ffi::AnyView k_scale, ffi::AnyView k_min, ffi::AnyView v_scale, ffi::AnyView v_min,
                 ffi::AnyView k_offset, ffi::AnyView k_channel_scale, bool clamped);

/// Adds the tensor behind `value` to `held`, so that its memory lives as long as `held`. None is skipped.
void hold(ffi::AnyView value, std::vector<ffi::Tensor>& held);

/// "f32", "f16", "bf16". Throws InvalidArgument naming `name` for any other text.
DType to_float_dtype(std::string_view text, std::string_view name);

/// (DLPack device type, index) as a Device; see to_view for the errors.
Device to_device(int type, int index, std::string_view name);

/// The stream for work on `device`: null on the CPU; `stream` if Python gave a number; else the stream that
/// the caller's framework has made current.
Stream to_stream(Device device, ffi::AnyView stream);

/// Throws ffi::Error of kind "halftone.<code name>" with the sentence, in which the names of C++ are those of
/// Python: halftone/errors.py maps the kinds.
[[noreturn]] void rethrow(const std::exception& error);

/// Runs the handlers of signals that have come, if this is Python's main thread. True if one raised an
/// exception, which is then Python's current one.
bool signal_raised() noexcept;

/// Calls `function` and lets only errors leave that Python has a class for. A signal handler that raises
/// (Ctrl-C) ends a call on the CPU.
template <class Function>
auto guarded(Function&& function) -> decltype(function()) {
  const cpu::Interruptible until_a_signal(signal_raised);
  try {
    return function();
  } catch (const cpu::Interrupted&) {
    throw ffi::EnvErrorAlreadySet();
  } catch (const ffi::Error&) {
    throw;
  } catch (const std::exception& error) {
    rethrow(error);
  }
}

}  // namespace halftone::python
