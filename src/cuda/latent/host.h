// Latent attention on CUDA: its rows of the backend's table, and which compiled kernel serves what.
#pragma once

#include <algorithm>
#include <array>

#include "cuda/append/params.h"
#include "cuda/attention/host.h"
#include "plan/backend.h"

namespace halftone::cuda {

/// What one CTA of the kernels for few heads takes, or one worker, a CTA or a pair, of those for many. Steps
/// are those of lists: they are short beside the contexts that decode cuts. A pair's unit is counted so that
/// two requests of 8,192 keys for each of 64 pairs stay whole, which takes 4% less than to cut them for 66.
inline constexpr std::array<planning::Kernel, 5> kLatentKernels{{
    {"sm90-latent-8", 8, 8, 64, 1024, 163840, "latent caches: up to 8 packed rows", false, 0, true},
    {"sm90-latent-16", 16, 16, 64, 1024, 163840, "likewise, up to 16; of small problems any number", false, 0,
     true},
    {"sm90-latent-32", 32, 32, 64, 1024, 163840,
     "likewise, up to 32; of second lists, small problems and most Q in f16 any number", false, 0, true},
    {"sm90-latent-64", 64, 64, 64, 1024, 122880,
     "likewise, up to 64: bound by matrix products; over bf16 mostly from 17 on", false, 0, true},
    {"sm90-latent-128", 0, 128, 64, 1024, 262144, "likewise, two CTAs that take the same tokens", false, 0,
     true, 2},
}};
// Where an item begins, the kernels take it for granted that only a unit's first part, cut by its rows'
// windows, may do so within a step of 64 tokens.
static_assert(std::ranges::all_of(kLatentKernels, [](const planning::Kernel& kernel) {
  return kernel.queue_bytes == 0 && kernel.kv_tile == 64;
}));

/// Which compiled kernel serves a latent cache in units of `kernel`, a row of kLatentKernels; -1: none.
int latent_variant(const AttentionProblem& problem, const planning::Kernel& kernel);

/// What is copied of a place of a list before a kernel in such units reads it; no bytes: nothing.
planning::StagedKey latent_staged_key(const AttentionProblem& problem, const planning::Kernel& kernel);

/// For a problem over a latent cache that no row serves: throws Unsupported.
[[noreturn]] void refuse_latent(const AttentionProblem& problem);

/// The kernel of a pass whose variant is one of these. Throws Internal if it is not in this build, and
/// InvalidArgument for outputs that it cannot write.
CompiledKernel latent_kernel(const Plan::Impl& plan, const planning::Pass& pass, const AttentionArgs& args);

/// Whether the kernel of a variant writes new tokens itself, and those of a step.
bool latent_appends(const AttentionProblem& problem, int variant);
bool latent_appends(const AppendParams& step);

/// Runs it. `fused`: it writes the new tokens; else, where the problem appends, the kernel before the first
/// pass does. Returns whether it advances lengths.
bool run_latent(const CompiledKernel& kernel, const Plan::Impl& plan, const AttentionArgs& args,
                const planning::Workspace& workspace, std::size_t index, bool fused, Stream stream);

}  // namespace halftone::cuda
