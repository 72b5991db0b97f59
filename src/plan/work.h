// The scheduler: which worker attends to which rows and keys. Shared by the CPU backend and by CUDA kernels.
//
// A unit is (request, KV head, row block): up to row_block packed rows, row = q_index * group + (q_head -
// kv_head * group). Its KV range [kv_begin, kv_end) covers every key that any of its rows may see; kv_begin
// is rounded down to a whole tile of 16 tokens, so no page outside the range is ever needed. The range is cut
// into steps at the absolute KV positions that are multiples of step_tokens: a step is one KV tile, or one
// whole split with `absolute` splits. A unit that has rows but no keys counts as one step (its item writes
// zeros); a request without rows has no unit, and neither has one that another pass of the plan serves.
//
// All units, ordered by (request, KV head, row block), are laid end to end on a line of positions: unit_cost
// positions for what it costs to begin one, then one for each of its steps, in KV order. The active workers
// share the line in contiguous pieces that differ by at most one position (stream-K, arXiv:2301.03598), the
// longer ones spread evenly, so that equal units of equally many workers begin where pieces do. A worker
// takes the steps whose positions are its own; build.h says when a worker stays idle. What a worker takes
// from one unit is its part. A cut unit has parts in several workers; they go through partial slots and are
// merged afterwards, in KV order:
// - With tiles (`absolute` false) a part is one item and, if the unit is cut, one slot.
// - With splits (`absolute` true) every split is an item that starts from an empty state, and the unit's
//   result is the left fold of its splits, ((s0 + s1) + s2) + ..., so that its bits do not depend on where
//   workers begin. The worker that begins a unit folds its splits into one slot; the workers that continue it
//   keep a slot per split.
//
// Nothing is materialised per item: storage is O(batch + workers), and WorkCursor produces the items.
#pragma once

#include <cstdint>

#include "format/host_device.h"

namespace halftone::planning {

/// Largest number of tokens or packed rows of a request: sums of two of them still fit into int32.
inline constexpr std::int32_t kMaxTokens = 1 << 30;
/// Rounding of kv_begin; equals kTileTokens of halftone/cache.h.
inline constexpr std::int32_t kRangeTokens = 16;

/// Everything that the scheduler knows of a plan.
struct ScheduleParams {
  std::int32_t batch;
  std::int32_t kv_heads;
  std::int32_t group;      ///< query heads per KV head
  std::int32_t row_block;  ///< packed rows of a unit
  std::int32_t step_log2;  ///< step_tokens = 1 << step_log2, a multiple of 16
  std::int32_t workers;    ///< >= 1
  std::int32_t max_q_len;
  std::int32_t max_kv_len;
  std::int32_t max_steps;        ///< of one unit, at the bounds
  std::int32_t window_left;      ///< -1 or at most kMaxTokens - 1
  std::int32_t window_right;     ///< likewise; 0 when causal
  std::int32_t unit_cost;        ///< of beginning a unit, in steps; 0 if `absolute`
  bool absolute;                 ///< every step is an item: batch-invariant splits
  bool even_parts = false;       ///< workers rather stay idle than have parts of two units, where it pays
  std::int32_t queue_tokens;     ///< 0: workers share the line; else they take units from a queue
                                 ///< (plan/queue.h), those of as many heads at a time as have so many keys
  std::int32_t queue_heads = 1;  ///< and at least so many
  // Requests of other numbers of packed rows are another pass's: here they have no units.
  std::int32_t min_rows = 0;
  std::int32_t max_rows = INT32_MAX;
  std::int32_t staged_tokens = 1;  ///< staged keys of a request begin at multiples of it, a power of two
};

/// Product of non-negative numbers, at most INT64_MAX.
constexpr std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/// First bytes of a workspace. `magic` and `plan_id` tell a schedule from other bytes, and this plan's from
/// others.
struct ScheduleHeader {
  static constexpr std::uint64_t kMagic = 0x31454e4f54464c48;  // "HLFTONE1"
  std::uint64_t magic;
  std::uint64_t plan_id;
  std::int64_t total_steps;  ///< positions: steps, and what beginning the units costs
  std::int64_t share;        ///< positions of a worker; `extra` workers have one more
  std::int32_t extra;
  std::int32_t active;     ///< workers that have a share
  std::int32_t unit_cost;  ///< as far as this batch is the better for it
  std::int32_t partials;   ///< slots in use
  std::int32_t total_q;    ///< query tokens of all requests
  std::int64_t total_kv;   ///< key tokens of all requests
  std::int64_t units;      ///< units that have an item
  std::int32_t cut_units;  ///< of a queue: the last ones, which are cut,
  std::int32_t cut_parts;  ///< each into so many parts
  std::uint64_t user;      ///< of WorkspaceUse: not part of the schedule
};

/// Where a worker's share begins.
struct WorkerStart {
  std::int64_t position;  ///< the first one of the share
  std::int32_t request;
  std::int32_t kv_head;
  std::int32_t block;        ///< row block
  std::int32_t offset;       ///< step within the unit; > 0 when an earlier worker began it
  std::int32_t before;       ///< positions of the share before that step
  std::int32_t steps;        ///< of the unit
  std::int32_t first, last;  ///< workers that have its first and last step
  std::int32_t slot;         ///< the worker's first partial slot
};

/// A schedule: written by build_schedule(), read by everything else. All pointers point into one workspace,
/// where the passes of a plan share cu_q, kv_lengths, first_list and, of plain K and V, cu_kv. With listed
/// keys (plan/listed.h) its requests are queries.
struct Schedule {
  ScheduleParams params;
  ScheduleHeader* header;
  std::int64_t* first_step;  // [batch + 1] positions, or of a queue units, before each request
  WorkerStart* starts;       // [workers + 1]; entry `active` marks the end
  std::int32_t* cu_q;        // [batch + 1] first query token of each request
  std::int32_t* kv_lengths;  // [batch]
  std::int32_t* cu_kv;       // [batch + 1] first key of each request, in plain K and V or in the staged ones
                             // of a pass; else null
  std::int32_t* staged;      // [batch] keys of each request that the pass stages; else null
  std::int32_t* first_list;  // [batch] two lists of keys: places of the first; else null
};

/// One piece of work. The worker attends rows [row_begin, row_end) to keys [kv_begin, kv_end) from an empty
/// state, then
///   if (fold)   state = merge(state in slot `partial`, state);
///   if (finish) write the rows' output and LSE;  else  store the state into slot `partial`.
struct WorkItem {
  std::int32_t request;
  std::int32_t kv_head;
  std::int32_t row_begin;  ///< packed rows of the request; row / group is the query index
  std::int32_t row_end;
  std::int32_t kv_begin;  ///< a multiple of 16; kv_begin == kv_end (any value) when there is no key
  std::int32_t kv_end;
  std::int32_t partial;  ///< slot, or -1 when the item is the whole unit
  bool fold;             ///< only with absolute splits
  bool finish;
};

/// A unit in several parts: slots [slot, slot + parts) hold them in KV order. merge = left fold, then write
/// the output.
struct MergeItem {
  std::int32_t request;
  std::int32_t kv_head;
  std::int32_t row_begin;
  std::int32_t row_end;
  std::int32_t slot;
  std::int32_t parts;
};

HT_HOST_DEVICE constexpr std::int32_t min_of(std::int32_t a, std::int32_t b) { return a < b ? a : b; }
HT_HOST_DEVICE constexpr std::int32_t max_of(std::int32_t a, std::int32_t b) { return a > b ? a : b; }

/// Keys [begin, end) that queries [q_first, q_last] of a request may see, begin rounded down to 16; {0, 0} if
/// none.
struct KvRange {
  std::int32_t begin;
  std::int32_t end;
};
HT_HOST_DEVICE constexpr KvRange visible_range(const ScheduleParams& p, std::int32_t q_len,
                                               std::int32_t kv_len, std::int32_t q_first,
                                               std::int32_t q_last) {
  const std::int32_t shift = kv_len - q_len;  // bottom-right alignment: query i stands at i + shift
  std::int32_t begin = 0, end = kv_len;
  if (p.window_left >= 0) begin = max_of(0, q_first + shift - p.window_left);
  if (p.window_right >= 0) end = min_of(kv_len, q_last + shift + 1 + p.window_right);
  if (begin >= end) return {0, 0};
  return {begin / kRangeTokens * kRangeTokens, end};
}

/// Walks the row blocks of one request; divides only in seek().
struct BlockWalk {
  std::int32_t q_len = 0;
  std::int32_t kv_len = 0;
  std::int32_t rows = 0;  ///< packed rows of the request
  std::int32_t block = 0;
  std::int32_t row_begin = 0;  ///< = q_begin * group + q_rest
  std::int32_t q_begin = 0;
  std::int32_t q_rest = 0;
  std::int32_t block_queries = 0;  ///< row_block = block_queries * group + block_rest
  std::int32_t block_rest = 0;

  // Of the current block:
  std::int32_t row_end = 0;
  KvRange range{};
  std::int32_t first_step = 0;  ///< absolute index: kv_begin >> step_log2
  std::int32_t steps = 0;       ///< >= 1

  HT_HOST_DEVICE constexpr explicit BlockWalk(const ScheduleParams& p)
      : block_queries(p.row_block / p.group), block_rest(p.row_block % p.group) {}

  HT_HOST_DEVICE constexpr void request(const ScheduleParams& p, std::int32_t queries, std::int32_t keys) {
    q_len = queries;
    kv_len = keys;
    rows = queries * p.group;
  }
  HT_HOST_DEVICE constexpr bool valid() const { return row_begin < rows; }

  HT_HOST_DEVICE constexpr void rewind(const ScheduleParams& p) {
    block = row_begin = q_begin = q_rest = 0;
    load(p);
  }
  HT_HOST_DEVICE constexpr void seek(const ScheduleParams& p, std::int32_t to) {
    block = to;
    row_begin = to * p.row_block;
    q_begin = row_begin / p.group;
    q_rest = row_begin % p.group;
    load(p);
  }
  HT_HOST_DEVICE constexpr void next(const ScheduleParams& p) {
    ++block;
    row_begin += p.row_block;
    q_begin += block_queries;
    q_rest += block_rest;
    if (q_rest >= p.group) {
      q_rest -= p.group;
      ++q_begin;
    }
    load(p);
  }

 private:
  HT_HOST_DEVICE constexpr void load(const ScheduleParams& p) {
    if (!valid()) return;
    row_end = min_of(rows, row_begin + p.row_block);
    std::int32_t q_last = q_len - 1;
    if (row_end < rows) {  // the row before the next block's first one
      const std::int32_t rest = q_rest + block_rest;
      q_last = q_begin + block_queries + (rest > p.group ? 1 : 0) - (rest == 0 ? 1 : 0);
    }
    range = visible_range(p, q_len, kv_len, q_begin, q_last);
    first_step = range.begin >> p.step_log2;
    steps = range.end == 0 ? 1 : ((range.end - 1) >> p.step_log2) - first_step + 1;
  }
};

/// Row blocks of one KV head of a request.
HT_HOST_DEVICE constexpr std::int32_t row_blocks(const ScheduleParams& p, std::int32_t q_len) {
  return (q_len * p.group + p.row_block - 1) / p.row_block;
}

/// Steps of one KV head of a request. Its positions are these and unit_cost for each row block.
HT_HOST_DEVICE constexpr std::int64_t head_steps(const ScheduleParams& p, std::int32_t q_len,
                                                 std::int32_t kv_len) {
  BlockWalk walk(p);
  walk.request(p, q_len, kv_len);
  walk.rewind(p);
  if (p.window_left < 0 && p.window_right < 0) {  // every block sees all keys
    return walk.valid() ? std::int64_t{row_blocks(p, q_len)} * walk.steps : 0;
  }
  std::int64_t steps = 0;
  for (; walk.valid(); walk.next(p)) steps += walk.steps;
  return steps;
}

HT_HOST_DEVICE constexpr std::int32_t q_length(const Schedule& s, std::int32_t request) {
  return s.cu_q[request + 1] - s.cu_q[request];
}

/// `q_len` if this schedule serves a request of so many queries, else 0.
HT_HOST_DEVICE constexpr std::int32_t served(const ScheduleParams& p, std::int32_t q_len) {
  const std::int32_t rows = q_len * p.group;
  return rows < p.min_rows || rows > p.max_rows ? 0 : q_len;
}

/// Queries of a request, none of one that this schedule does not serve.
HT_HOST_DEVICE constexpr std::int32_t served_queries(const Schedule& s, std::int32_t request) {
  return served(s.params, q_length(s, request));
}

/// First position of a worker's share; share_begin(h, w + 1) is its end.
HT_HOST_DEVICE constexpr std::int64_t share_begin(const ScheduleHeader& h, std::int32_t worker) {
  if (worker >= h.active) return h.total_steps;
  return worker * h.share + std::int64_t{worker} * h.extra / h.active;
}
/// The same as the schedule has it, without a division.
HT_HOST_DEVICE constexpr std::int64_t share_begin(const Schedule& s, std::int32_t worker) {
  return worker >= s.header->active ? s.header->total_steps : s.starts[worker].position;
}

/// The worker whose share has position `at`, less than total_steps.
HT_HOST_DEVICE constexpr std::int32_t worker_at(const ScheduleHeader& h, std::int64_t at) {
  return static_cast<std::int32_t>(((at + 1) * h.active - 1) / h.total_steps);
}

/// Produces the items of one worker: `WorkCursor c(schedule, w); for (WorkItem i; c.next(i);) ...`
class WorkCursor {
 public:
  HT_HOST_DEVICE constexpr WorkCursor(const Schedule& s, std::int32_t worker)
      : s_(s), walk_(s.params), remaining_(share_begin(s, worker + 1) - share_begin(s, worker)) {
    if (remaining_ == 0) return;
    const WorkerStart& start = s.starts[worker];
    remaining_ -= start.before;
    request_ = start.request;
    kv_head_ = start.kv_head;
    offset_ = start.offset;
    slot_ = start.slot;
    inherited_ = start.offset > 0;
    walk_.request(s.params, q_length(s, request_), s.kv_lengths[request_]);
    walk_.seek(s.params, start.block);
  }

  HT_HOST_DEVICE constexpr bool next(WorkItem& item) {
    if (offset_ == walk_.steps && remaining_ > 0) next_unit();
    if (remaining_ <= 0) return false;
    const std::int32_t left = walk_.steps - offset_;
    const std::int32_t take = s_.params.absolute  ? 1
                              : left < remaining_ ? left
                                                  : static_cast<int>(remaining_);
    const bool ends = take == left;
    item.request = request_;
    item.kv_head = kv_head_;
    item.row_begin = walk_.row_begin;
    item.row_end = walk_.row_end;
    item.kv_begin = offset_ == 0 ? walk_.range.begin : (walk_.first_step + offset_) << s_.params.step_log2;
    item.kv_end = ends ? walk_.range.end : (walk_.first_step + offset_ + take) << s_.params.step_log2;
    item.fold = !inherited_ && offset_ > 0;
    item.finish = !inherited_ && ends;
    item.partial = item.finish && !item.fold ? -1 : slot_;
    if (inherited_) ++slot_;
    offset_ += take;
    remaining_ -= take;
    return true;
  }

 private:
  HT_HOST_DEVICE constexpr void next_unit() {
    remaining_ -= s_.header->unit_cost;
    if (remaining_ <= 0) return;
    offset_ = 0;
    inherited_ = false;
    walk_.next(s_.params);
    if (walk_.valid()) return;
    if (++kv_head_ == s_.params.kv_heads) {
      kv_head_ = 0;
      do ++request_;
      while (served_queries(s_, request_) == 0);
      walk_.request(s_.params, q_length(s_, request_), s_.kv_lengths[request_]);
    }
    walk_.rewind(s_.params);
  }

  const Schedule& s_;
  BlockWalk walk_;
  std::int64_t remaining_;
  std::int32_t request_ = 0;
  std::int32_t kv_head_ = 0;
  std::int32_t offset_ = 0;
  std::int32_t slot_ = 0;
  bool inherited_ = false;
};

/// The unit that `worker` began and another worker continued, if there is one: every cut unit belongs to
/// exactly one worker. Call after all workers' items are done.
HT_HOST_DEVICE constexpr bool merge_item(const Schedule& s, std::int32_t worker, MergeItem& item) {
  const ScheduleHeader& h = *s.header;
  if (worker + 1 >= h.active) return false;
  const WorkerStart& after = s.starts[worker + 1];
  const std::int64_t cut = share_begin(s, worker + 1);
  if (after.offset == 0 || cut - after.offset < share_begin(s, worker)) return false;
  BlockWalk walk(s.params);
  walk.request(s.params, q_length(s, after.request), s.kv_lengths[after.request]);
  walk.seek(s.params, after.block);
  const std::int32_t left = after.steps - after.offset;
  item.request = after.request;
  item.kv_head = after.kv_head;
  item.row_begin = walk.row_begin;
  item.row_end = walk.row_end;
  item.slot = after.slot - 1;
  item.parts = 1 + (s.params.absolute ? left : after.last - worker);
  return true;
}

}  // namespace halftone::planning
