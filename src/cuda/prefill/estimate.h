// Which kernels read a cache: estimates of how long those that can would take.
#pragma once

#include <cstdint>

#include "cuda/prefill/config.h"

namespace halftone::cuda {

/// Whether K of a cache is codes with one scale for all dims of a token and head, or fewer.
bool has_codes(const KvCacheSpec& spec, DType codes);
/// Whether products in E4M3 take V as the cache has it: its scale, which is static, multiplies O.
bool has_value_codes(const KvCacheSpec& spec);

/// Whether the kernel of a row reads K and V of a cache as codes in their pages.
bool reads_packed(const PrefillConfig& c, const KvCacheSpec& spec);

/// What prefill reads as K of a problem: the pages themselves where they hold values of Q's type; codes in
/// their pages where it can, and where that is estimated to take less time than staging; else rows that are
/// staged.
PrefillKeys keys_of(const AttentionProblem& problem);

/// Packed rows of a unit of prefill over such keys: of several shapes the one that is estimated to take less
/// time, but the table's first if the policy is batch_invariant, since then bounds must not decide.
std::int64_t prefill_unit(const AttentionProblem& problem, PrefillKeys keys);

/// Whether decode, in units of `unit` packed rows, is estimated to take less time than prefill for requests
/// at the bounds of a problem with pages.
bool decode_is_faster(const AttentionProblem& problem, int unit);

/// Likewise of the universal kernel.
bool universal_is_faster(const AttentionProblem& problem, int unit);

}  // namespace halftone::cuda
