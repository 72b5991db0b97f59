#include "cpu/slots.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "halftone/error.h"
#include "plan/check_tensor.h"

namespace halftone::cpu {
namespace {

[[noreturn]] void out_of_range(const std::string& sentence) { throw Error(ErrorCode::kOutOfRange, sentence); }
[[noreturn]] void invalid(const std::string& sentence) { throw Error(ErrorCode::kInvalidArgument, sentence); }

// Block-table look-up of one request's positions.
class RequestPages {
 public:
  RequestPages(const PagedKv& cache, std::int64_t request)
      : cache_(cache),
        request_(request),
        row_(static_cast<const std::int32_t*>(cache.block_table.data) +
             request * cache.block_table.strides[0]) {}

  std::int64_t slot(std::int64_t position) const {
    const std::int64_t column = position / cache_.spec.page_size;
    const std::int64_t page = row_[column];
    if (page >= 0 && page < cache_.pages.shape[0]) {
      return page * cache_.spec.page_size + position % cache_.spec.page_size;
    }
    if (cache_.table_mode == BlockTableMode::kClamped) return kNoSlot;
    out_of_range(fmt::format(
        "cache.block_table[{}, {}] is {}, but must be in [0, {}): give a page of the cache, or use "
        "BlockTableMode::kClamped.",
        request_, column, page, cache_.pages.shape[0]));
  }

 private:
  const PagedKv& cache_;
  std::int64_t request_;
  const std::int32_t* row_;
};

std::int64_t checked_length(const PagedKv& cache, std::int64_t request, std::int64_t added) {
  const std::int64_t length = static_cast<const std::int32_t*>(cache.lengths.data)[request];
  const std::int64_t capacity = cache.block_table.shape[1] * cache.spec.page_size;
  if (length < 0) {
    out_of_range(fmt::format("cache.lengths[{}] is {}, but must be 0 or more: pass the live tokens.", request,
                             length));
  }
  if (length + added > capacity) {
    out_of_range(fmt::format(
        "cache.lengths[{}] {}is {}, but the block table holds {} tokens per request: add pages to "
        "the table.",
        request, added > 0 ? fmt::format("+ {} new tokens ", added) : "", length + added, capacity));
  }
  return length;
}

void check_unique(const std::vector<std::int64_t>& slots, std::string_view name) {
  std::vector<std::int64_t> sorted;
  sorted.reserve(slots.size());
  bool increasing = true;
  for (const std::int64_t s : slots) {
    if (s < 0) continue;
    increasing = increasing && (sorted.empty() || sorted.back() < s);
    sorted.push_back(s);
  }
  if (increasing) return;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end()) return;
  const auto first = std::find(slots.begin(), slots.end(), *twice);
  const auto second = std::find(first + 1, slots.end(), *twice);
  invalid(fmt::format("{} sends tokens {} and {} to slot {}, but a slot holds one token: give each its own.",
                      name, first - slots.begin(), second - slots.begin(), *twice));
}

std::vector<std::int64_t> read_slots(const PagedKv& cache, const TensorView& view, std::string_view name,
                                     bool may_skip) {
  const std::int64_t capacity = cache.pages.shape[0] * cache.spec.page_size;
  const auto* values = static_cast<const std::int64_t*>(view.data);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(view.shape[0]));
  for (std::size_t i = 0; i < slots.size(); ++i) {
    slots[i] = values[i];
    if (slots[i] >= capacity || (slots[i] < 0 && !may_skip)) {
      out_of_range(fmt::format("{}[{}] is {}, but the cache has slots 0 to {}: {}.", name, i, slots[i],
                               capacity - 1,
                               may_skip ? "add pages, or skip the token with -1" : "add pages"));
    }
    slots[i] = std::max(slots[i], kNoSlot);
  }
  return slots;
}

}  // namespace

Slots append_slots(const PagedKv& cache, const AppendArgs& args) {
  Slots slots;
  const std::int64_t tokens = args.k.shape[0];
  if (planning::given(args.slot_mapping)) {
    slots.of_token = read_slots(cache, args.slot_mapping, "slot_mapping", true);
    check_unique(slots.of_token, "slot_mapping");
    return slots;
  }
  const auto* cu = static_cast<const std::int32_t*>(args.cu_seqlens.data);
  const std::int64_t batch = cache.lengths.shape[0];
  if (cu[0] != 0) invalid(fmt::format("cu_seqlens[0] is {}, but must be 0: start at 0.", cu[0]));
  for (std::int64_t i = 0; i < batch; ++i) {
    if (cu[i + 1] < cu[i]) {
      invalid(fmt::format(
          "cu_seqlens[{}] is {}, but must not be less than cu_seqlens[{}] = {}: pass running sums.", i + 1,
          cu[i + 1], i, cu[i]));
    }
  }
  if (cu[batch] != tokens) {
    invalid(fmt::format("cu_seqlens[{}] is {}, but must equal the {} tokens of k: pass running sums.", batch,
                        cu[batch], tokens));
  }
  slots.of_token.reserve(static_cast<std::size_t>(tokens));
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t added = cu[i + 1] - cu[i];
    if (added == 0) continue;
    const std::int64_t length = checked_length(cache, i, added);
    const RequestPages pages(cache, i);
    for (std::int64_t j = 0; j < added; ++j) {
      slots.of_token.push_back(pages.slot(length + j));
      slots.bad_page = slots.bad_page || slots.of_token.back() == kNoSlot;
    }
  }
  check_unique(slots.of_token, "cache.block_table");
  return slots;
}

Slots step_slots(const PagedKv& cache, const NewTokens& tokens, const planning::Schedule& schedule) {
  Slots slots;
  const auto* mapping = static_cast<const std::int64_t*>(tokens.slot_mapping.data);
  slots.of_token.reserve(static_cast<std::size_t>(tokens.k.shape[0]));
  for (std::int32_t i = 0; i < schedule.params.batch; ++i) {
    const RequestPages pages(cache, i);
    const std::int32_t begin = schedule.cu_q[i], end = schedule.cu_q[i + 1];
    for (std::int32_t t = begin; t < end; ++t) {
      const bool skipped = mapping != nullptr && mapping[t] < 0;
      const std::int32_t position = schedule.kv_lengths[i] - (end - t);
      const std::int64_t slot = skipped ? kNoSlot : pages.slot(position);
      slots.of_token.push_back(slot);
      if (skipped) continue;
      if (slot == kNoSlot) {
        slots.bad_page = true;
      } else if (mapping != nullptr && mapping[t] != slot) {
        invalid(
            fmt::format("slot_mapping[{}] is {}, but its token is request {}'s at position {}, which "
                        "cache.block_table has in slot {}: pass that, or no slot_mapping.",
                        t, mapping[t], i, position, slot));
      }
    }
  }
  check_unique(slots.of_token, "cache.block_table");
  return slots;
}

Slots live_slots(const PagedKv& cache) {
  Slots slots;
  const std::int64_t batch = cache.lengths.shape[0];
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t length = checked_length(cache, i, 0);
    const RequestPages pages(cache, i);
    for (std::int64_t j = 0; j < length; ++j) {
      slots.of_token.push_back(pages.slot(j));
      slots.bad_page = slots.bad_page || slots.of_token.back() == kNoSlot;
    }
  }
  return slots;
}

std::vector<std::int64_t> explicit_slots(const PagedKv& cache, const TensorView& view, bool unique) {
  std::vector<std::int64_t> slots = read_slots(cache, view, "slots", false);
  if (unique) check_unique(slots, "slots");
  return slots;
}

}  // namespace halftone::cpu
