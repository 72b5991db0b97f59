// What Python holds on to between calls: a cache's geometry, a view of a cache, its books, a plan, a
// scheduled step.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "halftone/attention.h"
#include "halftone/error.h"
#include "halftone/sequences.h"

namespace halftone::python {

namespace ffi = ::tvm::ffi;

struct SpecObj : ffi::Object {
  explicit SpecObj(const KvCacheSpec& s) : spec(s) {}
  KvCacheSpec spec;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("halftone.Spec", SpecObj, ffi::Object);
};

struct CacheObj : ffi::Object {
  PagedKv cache;
  std::vector<ffi::Tensor> held;  // the memory that `cache` points to
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("halftone.Cache", CacheObj, ffi::Object);
};

struct SequencesObj : ffi::Object {
  explicit SequencesObj(SequenceTable t) : table(std::move(t)) {}
  SequenceTable table;

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("halftone.Sequences", SequencesObj, ffi::Object);
};

struct PlanObj : ffi::Object {
  explicit PlanObj(Plan p) : plan(std::move(p)) {}
  Plan plan;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("halftone.Plan", PlanObj, ffi::Object);
};

/// A workspace with a schedule of `plan`, and the lengths that it was made from.
struct StepObj : ffi::Object {
  Plan plan;
  SequenceLengths lengths;
  TensorView workspace;
  std::vector<ffi::Tensor> held;
  std::atomic<bool> in_use = false;      // by a call of some thread
  std::atomic<Stream> stream = nullptr;  // that it was last scheduled on; null on the CPU

  /// Whether `on` orders work after the last schedule(): CUDA has two names for its default stream.
  bool is_ordered_by(Stream on) const {
    const auto plain = [](Stream s) { return reinterpret_cast<std::uintptr_t>(s) == 1 ? nullptr : s; };
    return plan.problem().device.type == DeviceType::kCpu || plain(on) == plain(stream);
  }

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("halftone.Step", StepObj, ffi::Object);
};

/// A call's hold on a step. Calls release Python's lock, so that a second one could come between the first's
/// kernels, or on the CPU write its partial results among the first's. Throws InvalidArgument then.
class StepUse {
 public:
  explicit StepUse(StepObj& step) : step_(step) {
    if (step_.in_use.exchange(true, std::memory_order_acquire)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "schedule is in use by another call, but its workspace serves one at a time: make a "
                  "schedule for each thread.");
    }
  }
  ~StepUse() { step_.in_use.store(false, std::memory_order_release); }
  StepUse(const StepUse&) = delete;
  StepUse& operator=(const StepUse&) = delete;

 private:
  StepObj& step_;
};

/// A counted reference to one of them.
template <class T>
struct Ref : ffi::ObjectRef {
  explicit Ref(ffi::ObjectPtr<T> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Ref, ffi::ObjectRef, T);
};

}  // namespace halftone::python
