// The ways to attend one item, each compiled per target and chosen at run time. All start from an empty
// state and leave max, sum and out of the item's rows in `scratch`. None allocates.
#pragma once

#include <array>

#include "cpu/attention/layer.h"
#include "plan/kernel.h"

namespace halftone::cpu {

/// Every row has the same kv_tile and split_tokens, so that a request's bits do not depend on which row its
/// batch led to.
/// Timed on int8-head (docs/benchmarks-cpu.md): cpu-decode 71 GB/s, 64% of plain reads, on 16 cores,
/// cpu-prefill 154 to 176 GFLOP/s on two; the others are not.
inline constexpr std::array<planning::Kernel, 4> kAttentionKernels{{
    {"cpu-decode", 16, 16, 64, 1024, 0, "one or a few queries per request; bound by reading the cache"},
    {"cpu-speculative", 64, 32, 64, 1024, 0, "drafts of several queries, or many query heads per KV head"},
    {"cpu-chunk", 0, kStripRows, 64, 1024, 0, "chunks of prompts, up to 1024 rows: units for many threads"},
    {"cpu-prefill", 0, kMaxRows, 64, 1024, 0, "prompts; bound by arithmetic"},
}};
static_assert(planning::is_consistent(kAttentionKernels));
/// Up to so many packed rows per request small units keep more threads busy; beyond, large ones share what
/// bringing K and V to operands costs.
inline constexpr std::int64_t kChunkRows = 1024;

/// Few rows: reads the codes where they lie. item.rows <= kDirectRows.
void direct_item(const Layer& layer, const Item& item, Scratch& scratch);

/// Any number of rows: decodes each chunk once, then multiplies blocks of it with all rows.
void blocked_item(const Layer& layer, const Item& item, Scratch& scratch);

/// Of a layer with `gather`: decodes tokens one by one. item.rows <= kGatheredRows.
void gathered_item(const Layer& layer, const Item& item, Scratch& scratch);

/// hadamard::rotate(), in vectors.
void rotate_row(float* x, int dim);

/// fp32 lanes of a vector on the instruction set that these run on: what a layer's maps must be made for.
int vector_lanes();

}  // namespace halftone::cpu
