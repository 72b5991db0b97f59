// Where tokens live: slot = page * page_size + offset within the page.
#pragma once

#include <cstdint>
#include <vector>

#include "format/page.h"
#include "halftone/attention.h"
#include "plan/work.h"

namespace halftone::cpu {

inline constexpr std::int64_t kNoSlot = -1;

/// One slot, or kNoSlot, per appended token, and whether kClamped had to exclude tokens. Checks every value
/// that decides where bytes go. Throws OutOfRange (slot, page or length beyond the cache) or InvalidArgument
/// (decreasing cu_seqlens, two tokens with one slot).
struct Slots {
  std::vector<std::int64_t> of_token;
  bool bad_page = false;
};
Slots append_slots(const PagedKv& cache, const AppendArgs& args);

/// The same for the tokens that run() appends: the last keys of the schedule's requests, which the block
/// table has room for. Throws like append_slots(), and InvalidArgument where a slot mapping and the block
/// table differ.
Slots step_slots(const PagedKv& cache, const NewTokens& tokens, const planning::Schedule& schedule);

/// The slots of all live tokens, request after request: sum(lengths) values. With kClamped, tokens behind a
/// bad page entry have kNoSlot. Throws OutOfRange.
Slots live_slots(const PagedKv& cache);

/// Slots given one by one, all of which must exist. Throws OutOfRange, or InvalidArgument if `unique` and two
/// agree.
std::vector<std::int64_t> explicit_slots(const PagedKv& cache, const TensorView& slots, bool unique);

/// Address of the tile that holds `slot` of KV head `head`.
inline std::uint8_t* tile_of(const PagedKv& cache, const PageLayout& layout, std::int64_t slot, int head) {
  const std::int64_t page = slot / cache.spec.page_size;
  const int offset = static_cast<int>(slot % cache.spec.page_size);
  return static_cast<std::uint8_t*>(cache.pages.data) + page * cache.pages.strides[0] +
         page::tile_offset(layout, head, offset);
}

}  // namespace halftone::cpu
