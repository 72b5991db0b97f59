// What Python holds on to between calls: a cache's geometry, a view of a cache, a plan, a scheduled step.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <vector>

#include "halftone/attention.h"

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
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("halftone.Step", StepObj, ffi::Object);
};

/// A counted reference to one of them.
template <class T>
struct Ref : ffi::ObjectRef {
  explicit Ref(ffi::ObjectPtr<T> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(Ref, ffi::ObjectRef, T);
};

}  // namespace halftone::python
