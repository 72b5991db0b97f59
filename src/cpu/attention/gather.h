// Tokens that are read one by one: those of latent caches, whose records are rows, and listed ones of any
// cache.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cpu/attention/layer.h"
#include "format/head_dim.h"
#include "format/part.h"
#include "format/place_table.h"

namespace halftone::cpu {

/// Packed rows and tokens of a chunk: with the widest K they take no more memory than kStripRows rows
/// and kBlockedTokens tokens of kMaxDim dims.
inline constexpr int kGatheredRows = 32;
inline constexpr int kGatheredTokens = 32;
static_assert(kGatheredRows * kMaxSpanDims <= kStripRows * kMaxDim);
static_assert(kGatheredTokens * kMaxRowDims <= kBlockedTokens * (kMaxDim + 2 * kMaxLanes));
static_assert(kGatheredRows * kMaxRowDims <= kStripRows * (kMaxDim + 2 * kMaxLanes));

/// A cache and, if keys are listed, the lists of its slots.
struct GatherCache {
  page::Parts parts;
  Element elements[kMaxSpans] = {};
  const page::PlaceTable* tables[kMaxSpans] = {};  ///< null: rows
  StaticScale scales[kMaxSpans];                   ///< of K's span or V's
  PageLayout layout;
  const std::uint8_t* pages = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t num_pages = 0;
  int page_log2 = 0;
  const std::int32_t* indices = nullptr;  // [queries, index_stride]; null: the block table finds tokens
  std::int64_t index_stride = 0;
};

struct Gather {
  std::array<GatherCache, 2> caches;         ///< the second one only with a second list
  const std::int32_t* first_list = nullptr;  // [queries] two lists: places of the first; else null
  bool v_in_k = false;                       ///< V is the first dims of K
  std::vector<QuadClass> quads;              ///< of V, in rows
};

/// Whether a layer of the problem has one.
inline bool is_gathered(const AttentionProblem& p) { return p.is_latent() || p.is_listed(); }

/// Of one run, whose schedule has the lengths of its lists. Throws std::bad_alloc.
Gather make_gather(const Plan::Impl& plan, const AttentionArgs& args, const planning::Schedule& schedule);

}  // namespace halftone::cpu
