// Prefill on CUDA: its rows of the backend's table, and the launch of its kernels.
#pragma once

#include <array>

#include "cuda/attention/host.h"
#include "plan/backend.h"

namespace halftone::cuda {

/// Keys and values that may be in use at a time: what L2 keeps of them beside Q and O.
inline constexpr std::int64_t kL2Share = 40'000'000;

/// What one CTA of a prefill kernel takes, by the dims of V and by estimates for a plan's bounds.
inline constexpr std::array<planning::Kernel, 3> kPrefillKernels{{
    {"sm90-prefill-192", 0, 192, 128, 4096, 0, "prompts, bound by matrix products; V of 64 to 128 dims",
     false, kL2Share},
    {"sm90-prefill-128", 0, 128, 128, 4096, 0, "prompts; V of 192 or 256 dims, or chunks of 128 dims", false,
     kL2Share},
    {"sm90-prefill-64", 0, 64, 128, 4096, 0, "prompts, bound by matrix products; V of 512 dims", false,
     kL2Share},
}};

/// Packed rows of a request up to which no cache is staged for it.
inline constexpr std::int64_t kUnstagedRows = 160;
/// Keys of a request from which on the plan compares estimates for more rows than that, and for 16-bit pages:
/// below, kernels begin and end for as long as they read.
inline constexpr std::int64_t kComparedKeys = 4096;

/// Row of kPrefillTable that serves the problem in units of `kernel`; -1: none.
int prefill_variant(const AttentionProblem& problem, const planning::Kernel& kernel);

/// A key's K, its scale and V, if the kernel reads them from the workspace; else no bytes.
planning::StagedKey prefill_staged_key(const AttentionProblem& problem);

/// What a worker has in the workspace while it runs: fp32 sums of O, where products keep few bits.
std::int64_t prefill_scratch_bytes(int variant);

/// Throws InvalidArgument for tensors that the kernel of the pass cannot read or write, DeviceError if the
/// driver lacks tensor maps, Internal if the kernel is not in this build.
void check_prefill(const Plan::Impl& plan, const planning::Pass& pass, const AttentionArgs& args);

/// Of the pass `index` of the plan. Arguments are those that check_prefill() has accepted.
void run_prefill(const Plan::Impl& plan, const AttentionArgs& args, const planning::Workspace& workspace,
                 std::size_t index, Stream stream);

}  // namespace halftone::cuda
