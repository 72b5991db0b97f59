// Decode on CUDA: its rows of the backend's table, and the launch of one of its kernels.
#pragma once

#include <array>
#include <cstddef>

#include "cuda/attention/host.h"
#include "cuda/decode/params.h"
#include "plan/backend.h"

namespace halftone::cuda {

/// What one CTA of the decode kernel takes. A format and head_dim may lack some of them.
inline constexpr std::array<planning::Kernel, 4> kDecodeKernels{{
    {"sm90-decode-8", 8, 8, 128, 4096, 163840,
     "up to 8 packed rows, read at the speed of memory; of small caches up to 64"},
    {"sm90-decode-16", 16, 16, 128, 4096, 163840, "up to 16 packed rows; of most head_dims but 128 more"},
    {"sm90-decode-32", 32, 32, 128, 4096, 163840,
     "drafts, or many query heads per KV head, over codes; bound by arithmetic"},
    {"sm90-decode-64", 64, 64, 128, 4096, 163840, "likewise; prompts, too, that prefill does not serve"},
}};
/// For caches that none of them serves.
inline constexpr planning::Kernel kUniversalRow{
    "sm90-universal",
    8,
    8,
    128,
    4096,
    32768,
    "any formats, dims and types, in fp32; several times slower than reading memory",
    true};

/// Row of kDecodeTable that serves the problem in units of `kernel`, kUniversalKernel if that is the
/// universal row and kDecodeTable has no kernel for the problem, -1 else.
int decode_variant(const AttentionProblem& problem, const planning::Kernel& kernel);

/// Whether the kernel of a variant can write new tokens itself, and has the time at the bounds of the
/// problem.
bool decode_appends(const AttentionProblem& problem, int variant);
/// Whether it can those of a call.
bool decode_appends(const AppendParams& step);

/// The kernel of a pass whose variant is one of these. Throws if it is not in this build, and InvalidArgument
/// for outputs that it cannot write.
CompiledKernel decode_kernel(const Plan::Impl& plan, const planning::Pass& pass, const AttentionArgs& args);

/// Launches it, for pass `index` of the plan. `fused`: it writes the new tokens; else, where the problem
/// appends, the kernel before the first pass has. Whether it sets the cache's lengths.
bool run_decode(const CompiledKernel& kernel, const Plan::Impl& plan, const AttentionArgs& args,
                const planning::Workspace& workspace, std::size_t index, bool fused, Stream stream);

}  // namespace halftone::cuda
