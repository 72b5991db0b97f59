// The CUDA backend's entry points. Arguments are already validated (plan/validate.h); nothing here allocates
// device memory, synchronises or reads device memory on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "halftone/attention.h"
#include "plan/plan.h"

namespace halftone::cuda {

/// Multiprocessors of the device. Throws Unsupported, naming what is missing, unless it is a Hopper GPU
/// (compute capability 9.0) with a working driver.
int multiprocessors(int device);

/// Row of kDecodeTable that serves the problem in units of `config`, kUniversalKernel if that is the
/// universal row and kDecodeTable has no kernel for the problem, -1 else.
int find_kernel(const AttentionProblem& problem, const planning::Config& config);

/// For a problem that no kernel serves: throws Unsupported naming the field and what the backend has.
[[noreturn]] void refuse(const AttentionProblem& problem);

/// Bytes of a workspace that only this backend uses: listed items and arrival counters.
std::int64_t backend_bytes(int workers, std::int64_t partials);

void schedule(const Plan::Impl& plan, const SequenceLengths& lengths, std::byte* workspace, Stream stream);
void run(const Plan::Impl& plan, const AttentionArgs& args, std::byte* workspace, Stream stream);
void append(const PagedKv& cache, const AppendArgs& args, Stream stream);

/// Throws InvalidArgument if the outputs differ in rows. sum(lengths) is not known to the host: surplus rows
/// become zeros, surplus tokens are left out.
void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out, Stream stream);

/// Throws Unsupported beyond kMaxMergeParts parts.
void merge(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
           const TensorView& out, const TensorView& lse, Stream stream);

}  // namespace halftone::cuda
