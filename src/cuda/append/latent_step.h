// New tokens that a kernel of latent attention writes itself: warps that add up O have nothing to do when an
// item begins, and write those of the items at hand before the warps that bring tokens come to them.
#pragma once

#include "cuda/append/record.h"
#include "cuda/append/step.h"
#include "cuda/attention/latent_records.h"

namespace halftone::cuda {

inline constexpr int kAppenders = 8;  // warps
/// So many items behind the one that begins are appended, too. In the kernels for many heads who brings
/// tokens may be two steps ahead of what it has brought, and an item has at least one step: it then waits for
/// nobody who waits for it.
inline constexpr int kAppendedAhead = 2;

/// Items whose new tokens an appending warp has written.
using AppendedItems = volatile int[kAppenders];

/// The new token at `position` of the item's request, by a warp.
template <LatentCodes kCodes>
__device__ inline void append_record_at(const AppendParams& p, const DeviceItem& item, int position) {
  constexpr DType kType = kCodes == LatentCodes::kBf16   ? DType::kBFloat16
                          : kCodes == LatentCodes::kInt8 ? DType::kInt8
                          : kCodes == LatentCodes::kInt4 ? DType::kInt4
                                                         : DType::kFloat8E4M3;
  const std::int64_t token = std::int64_t{item.first_query} + position - first_new_token(item);
  if (token < 0 || token >= p.tokens) return;
  RawRecord raw;
  raw.load(p, token, thread_index() % 32);
  if (p.slot_mapping != nullptr && __ldg(p.slot_mapping + token) < 0) return;
  const RecordPlace to(p, table_slot(p, item.work.request, position));
  if (to.codes == nullptr) return;
  append_record<kType, kCodes == LatentCodes::kInt4, KnownRecord<kCodes>>(p, token, to, raw);
}

/// Before item `index`: the tokens of all items up to kAppendedAhead behind it, those that are not known yet
/// if `kWaits`. Of an item those from a multiple of `step` tokens on, as far as own(item, position) says that
/// the block reads them. By warp `warp` of kAppenders.
template <LatentCodes kCodes, bool kWaits, class Queue, class Own>
__device__ inline void append_items(const AppendParams& p, const Queue& queue, AppendedItems& appended,
                                    int index, int warp, int step, const Own& own) {
  const auto has = [&](int next) { return kWaits || next <= index ? queue.has(next) : queue.count > next; };
#pragma unroll 1
  for (int next = appended[warp]; next <= index + kAppendedAhead && has(next); ++next) {
    const DeviceItem& item = queue.items[next % unsigned{Queue::kCapacity}];
    append_tokens(p, item, item.work.kv_begin & -step, item.work.kv_end, [&](int begin, int end) {
      const int first = (warp + next) % kAppenders;  // single tokens of several items are not all one warp's
#pragma unroll 1
      for (int position = begin + first; position < end; position += kAppenders) {
        if (own(item, position)) append_record_at<kCodes>(p, item, position);
      }
    });
    appended[warp] = next + 1;
  }
  __syncwarp();
}

/// Before new tokens of the items up to `index` are read, where StepParams::new_tokens_late. By a warp.
__device__ inline void wait_for_items(const StepParams& step, int index, const AppendedItems& appended) {
  if (!step.appends) {
    wait_for_previous_kernel();
    return;
  }
  while (!__all_sync(~0u, appended[thread_index() % kAppenders] > index)) {
  }
  fence_tokens();
}

/// Before positions below `end` of the request of item `index` are read: new ones of them are there. By a
/// warp.
__device__ inline void wait_for_tokens(const StepParams& step, const DeviceItem& item, int index, int end,
                                       const AppendedItems& appended) {
  if (step.new_tokens_late && end > first_new_token(item)) wait_for_items(step, index, appended);
}

}  // namespace halftone::cuda
