// Where the K and V of a problem and of a call lie, for tests that know it and change it.
#pragma once

#include <variant>

#include "halftone/attention.h"

namespace halftone {

inline KvCacheSpec& spec_of(AttentionProblem& problem) { return std::get<KvCacheSpec>(problem.kv); }
inline PagedKv& cache_of(AttentionArgs& args) { return std::get<PagedKv>(args.kv); }
inline const PagedKv& cache_of(const AttentionArgs& args) { return std::get<PagedKv>(args.kv); }
inline KvTensorViews& tensors_of(AttentionArgs& args) { return std::get<KvTensorViews>(args.kv); }

}  // namespace halftone
