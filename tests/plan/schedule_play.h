// A schedule in guarded memory, and a player that carries it out on intervals instead of numbers.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/workspace.h"

namespace halftone::schedule_play {

using namespace planning;

struct Request {
  std::int32_t q_len;
  std::int32_t kv_len;
};

inline ScheduleParams make_params(std::int32_t kv_heads, std::int32_t group, std::int32_t row_block,
                                  std::int32_t step_log2, std::int32_t workers, bool absolute) {
  ScheduleParams p{};
  p.kv_heads = kv_heads;
  p.group = group;
  p.row_block = row_block;
  p.step_log2 = step_log2;
  p.workers = workers;
  p.window_left = p.window_right = -1;
  p.absolute = absolute;
  return p;
}

/// Of a workspace for schedules alone.
inline WorkspaceParams schedules_only(std::initializer_list<ScheduleParams> passes) {
  WorkspaceParams sizes;
  sizes.count = 0;
  sizes.v_dim = 1;
  for (const ScheduleParams& params : passes) {
    sizes.passes[static_cast<std::size_t>(sizes.count++)].schedule = params;
  }
  return sizes;
}

/// The requests of at most `rows` packed rows for the first of two passes, the others for the second.
inline std::pair<ScheduleParams, ScheduleParams> divided(const ScheduleParams& params, std::int32_t rows) {
  std::pair<ScheduleParams, ScheduleParams> passes{params, params};
  passes.first.max_rows = rows;
  passes.second.min_rows = rows + 1;
  return passes;
}

/// A schedule in a workspace of exactly the stated size, between guard bytes and prefilled with 0xFF.
/// `staged`: with the places of staged keys.
class Built {
 public:
  Built(ScheduleParams params, const std::vector<Request>& requests, std::int32_t slack = 0,
        bool staged = false) {
    params.batch = static_cast<std::int32_t>(requests.size());
    for (const Request& r : requests) {
      params.max_q_len = std::max(params.max_q_len, r.q_len + slack);
      params.max_kv_len = std::max(params.max_kv_len, r.kv_len + slack);
    }
    params.max_steps = max_unit_steps(params);
    partials_ = max_partials(params);
    WorkspaceParams sizes = schedules_only({params});
    sizes.passes[0].staged.keys = staged ? 1 : 0;
    size_ = static_cast<std::size_t>(carve_workspace(sizes, nullptr).bytes);
    memory_.reset(static_cast<std::byte*>(::operator new (size_ + 2 * kGuard, std::align_val_t{kGuard})));
    std::memset(memory_.get(), kGuardByte, size_ + 2 * kGuard);
    std::memset(memory_.get() + kGuard, 0xFF, size_);
    schedule_ = carve_workspace(sizes, memory_.get() + kGuard).passes[0].schedule;
    schedule_.cu_q[0] = 0;
    for (std::size_t r = 0; r < requests.size(); ++r) {
      schedule_.cu_q[r + 1] = schedule_.cu_q[r] + requests[r].q_len;
      schedule_.kv_lengths[r] = requests[r].kv_len;
    }
    build_schedule(schedule_, 7);
  }
  const Schedule& operator*() const { return schedule_; }
  const Schedule* operator->() const { return &schedule_; }
  std::int64_t max_slots() const { return partials_; }
  bool guards_intact() const {
    const auto intact = [](const std::byte* p) {
      return std::all_of(p, p + kGuard, [](std::byte b) { return b == std::byte{kGuardByte}; });
    };
    return intact(memory_.get()) && intact(memory_.get() + kGuard + size_);
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr unsigned char kGuardByte = 0xA5;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{kGuard}); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
  std::int64_t partials_ = 0;
  Schedule schedule_{};
};

/// Any parameters and lengths, small.
struct RandomCase {
  ScheduleParams params;
  std::vector<Request> requests;
  std::int32_t slack;
};

inline RandomCase random_case(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto integer = [&](std::int32_t low, std::int32_t high) {
    return std::uniform_int_distribution<std::int32_t>(low, high)(random);
  };
  const auto pick = [&](std::initializer_list<std::int32_t> choices) {
    return *(choices.begin() + integer(0, static_cast<std::int32_t>(choices.size()) - 1));
  };
  RandomCase c;
  c.params =
      make_params(integer(1, 4), pick({1, 2, 3, 4, 5, 7, 8, 16, 33, 128}), pick({1, 3, 8, 16, 32, 64, 128}),
                  integer(4, 8), pick({1, 2, 3, 4, 8, 17, 40, 133, 1000}), integer(0, 1) == 1);
  if (!c.params.absolute) c.params.unit_cost = pick({0, 0, 1, 3, 7, 40});
  c.params.even_parts = pick({0, 1}) == 1;
  if (integer(0, 2) == 0) c.params.window_left = pick({0, 1, 15, 16, 17, 63, 64, 100, 4096});
  if (integer(0, 2) == 0) c.params.window_right = pick({0, 0, 0, 1, 16, 63, 4096});
  const std::int32_t longest_q = pick({1, 1, 4, 40}), longest_kv = pick({0, 1, 70, 300, 3000});
  c.requests.resize(static_cast<std::size_t>(integer(0, 12)));
  for (Request& r : c.requests) {
    r.q_len = integer(0, 9) == 0 ? 0 : integer(1, longest_q);
    r.kv_len = integer(0, 9) == 0 ? 0 : integer(0, longest_kv);
    if (r.kv_len > 0 && integer(0, 3) == 0) r.kv_len = std::max(0, (r.kv_len >> 4 << 4) + integer(-1, 1));
  }
  c.slack = pick({0, 0, 1, 64, 1000});
  return c;
}

/// Keys that one row sees, straight from the definition of Mask.
inline KvRange row_range(const ScheduleParams& p, const Request& r, std::int64_t row) {
  const std::int64_t position = row / p.group + r.kv_len - r.q_len;
  std::int64_t begin = 0, end = r.kv_len;
  if (p.window_left >= 0) begin = std::max(begin, position - p.window_left);
  if (p.window_right >= 0) end = std::min(end, position + p.window_right + 1);
  if (begin >= end) return {0, 0};
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)};
}

/// How often items read each (row, key) of a case.
class Visits {
 public:
  explicit Visits(const RandomCase& c) : case_(c) {
    for (std::size_t r = 0; r < c.requests.size(); ++r) {
      for (std::int32_t h = 0; h < c.params.kv_heads; ++h) {
        counts_[{static_cast<std::int32_t>(r), h}].resize(
            static_cast<std::size_t>(c.requests[r].q_len * c.params.group * c.requests[r].kv_len));
      }
    }
  }
  void add(const WorkItem& item) {
    std::vector<std::uint8_t>& count = counts_.at({item.request, item.kv_head});
    const std::int32_t kv_len = case_.requests[static_cast<std::size_t>(item.request)].kv_len;
    for (std::int32_t row = item.row_begin; row < item.row_end; ++row) {
      for (std::int32_t key = item.kv_begin; key < item.kv_end; ++key) {
        ++count.at(static_cast<std::size_t>(row * kv_len + key));
      }
    }
  }
  /// None twice, and none missing that the mask shows.
  void expect_once() const {
    for (const auto& [where, count] : counts_) {
      const Request& request = case_.requests[static_cast<std::size_t>(where.first)];
      for (std::size_t i = 0; i < count.size(); ++i) {
        const auto row = static_cast<std::int32_t>(i) / request.kv_len;
        const auto key = static_cast<std::int32_t>(i) % request.kv_len;
        const KvRange seen = row_range(case_.params, request, row);
        ASSERT_GE(count[i], key >= seen.begin && key < seen.end ? 1 : 0) << "row " << row << " key " << key;
        ASSERT_LE(count[i], 1) << "row " << row << " key " << key;
      }
    }
  }

 private:
  const RandomCase& case_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::uint8_t>> counts_;  // [rows, kv_len]
};

struct Unit {
  std::int32_t row_begin, row_end;
  KvRange range;                        // union over the rows, begin rounded down to 16
  std::vector<KvRange> items;           // in the order of workers
  std::vector<std::int32_t> item_slot;  // slot of each item, or -1
  int finished = 0;
  bool merged = false;
};

using UnitKey = std::tuple<std::int32_t, std::int32_t, std::int32_t>;  // request, KV head, first row

/// Rows of a request, with the keys that any of them sees.
inline Unit unit_of_rows(const ScheduleParams& p, const Request& request, std::int32_t begin,
                         std::int32_t end) {
  Unit unit{begin, end, {0, 0}, {}, {}, 0, false};
  for (std::int32_t row = begin; row < end; ++row) {
    const KvRange seen = row_range(p, request, row);
    if (seen.end == 0) continue;
    unit.range = unit.range.end == 0
                     ? seen
                     : KvRange{std::min(unit.range.begin, seen.begin), std::max(unit.range.end, seen.end)};
  }
  unit.range.begin = unit.range.begin / 16 * 16;
  return unit;
}

/// Units enumerated independently of the scheduler.
inline std::map<UnitKey, Unit> expected_units(const ScheduleParams& p, const std::vector<Request>& requests) {
  std::map<UnitKey, Unit> units;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const std::int32_t rows = requests[r].q_len * p.group;
    if (rows < p.min_rows || rows > p.max_rows) continue;
    for (std::int32_t begin = 0; begin < rows; begin += p.row_block) {
      const Unit unit = unit_of_rows(p, requests[r], begin, std::min(rows, begin + p.row_block));
      for (std::int32_t h = 0; h < p.kv_heads; ++h) units[{static_cast<std::int32_t>(r), h, begin}] = unit;
    }
  }
  return units;
}

/// Plays the workers' part on intervals instead of numbers: what a slot holds and what is written.
class Player {
 public:
  Player(const Built& built, const std::vector<Request>& requests)
      : built_(built),
        s_(*built),
        units_(expected_units(s_.params, requests)),
        slots_(static_cast<std::size_t>(s_.header->partials)) {}

  void play() {
    ASSERT_LE(s_.header->partials, built_.max_slots());
    lay_out();
    for (std::int32_t w = 0; w < s_.params.workers; ++w) {
      std::int64_t steps = 0;
      WorkCursor cursor(s_, w);
      for (WorkItem item; cursor.next(item);) {
        play_item(item, w);
        if (::testing::Test::HasFatalFailure()) return;
        steps += steps_of(item);
      }
      const std::int64_t begin = share_begin(*s_.header, w), end = share_begin(*s_.header, w + 1);
      ASSERT_EQ(steps, steps_within(begin, end)) << "worker " << w;
      if (w < s_.header->active) least_ = std::min(least_, end - begin);
      most_ = std::max(most_, end - begin);
    }
    const std::int64_t total = s_.header->total_steps;
    ASSERT_EQ(total, step_positions_.empty() ? 0 : step_positions_.back() + 1);
    if (total > 0) {
      ASSERT_LE(most_ - least_, 1) << "unequal shares";
    }
    const std::int64_t wanted = std::min<std::int64_t>(total, s_.params.workers);
    const std::int64_t active = s_.header->active;
    if (!s_.params.even_parts) {
      ASSERT_GE(active * 16, wanted * 15) << "idle workers";
    } else if (active * 16 < wanted * 15) {  // no more than cutting units for all workers would cost
      ASSERT_LE(total / active - total / wanted, 2 * s_.params.unit_cost + 1) << "idle workers";
    }
    for (std::int32_t w = 0; w < s_.params.workers; ++w) {
      MergeItem merge{};
      if (merge_item(s_, w, merge)) play_merge(merge);
      if (::testing::Test::HasFatalFailure()) return;
    }
    check_units();
    for (const Slot& slot : slots_) ASSERT_FALSE(slot.live) << "a partial result was never merged";
  }

 private:
  struct Slot {
    bool live = false;
    UnitKey unit;
    KvRange range;
    std::int32_t worker;
  };

  /// The line that the workers share, laid out independently of the scheduler.
  void lay_out() {
    std::int64_t at = 0;
    for (const auto& [key, unit] : units_) {
      at += s_.header->unit_cost;
      const std::int64_t steps = unit.range.end == 0 ? 1
                                                     : ((unit.range.end - 1) >> s_.params.step_log2) -
                                                           (unit.range.begin >> s_.params.step_log2) + 1;
      for (std::int64_t i = 0; i < steps; ++i) step_positions_.push_back(at++);
    }
  }
  std::int64_t steps_within(std::int64_t begin, std::int64_t end) const {
    const auto first = std::lower_bound(step_positions_.begin(), step_positions_.end(), begin);
    return std::lower_bound(first, step_positions_.end(), end) - first;
  }

  std::int64_t steps_of(const WorkItem& item) const {
    if (item.kv_end == item.kv_begin) return 1;
    return ((item.kv_end - 1) >> s_.params.step_log2) - (item.kv_begin >> s_.params.step_log2) + 1;
  }

  void play_item(const WorkItem& item, std::int32_t worker) {
    const UnitKey key{item.request, item.kv_head, item.row_begin};
    const auto found = units_.find(key);
    ASSERT_NE(found, units_.end()) << "an item of no unit";
    Unit& unit = found->second;
    ASSERT_EQ(item.row_end, unit.row_end);
    ASSERT_LE(item.kv_begin, item.kv_end);
    if (s_.params.absolute) {
      ASSERT_EQ(steps_of(item), 1);
    }
    unit.items.push_back({item.kv_begin, item.kv_end});
    KvRange state{item.kv_begin, item.kv_end};
    unit.item_slot.push_back(item.partial);
    if (item.partial < 0) {
      ASSERT_EQ(item.partial, -1);
      ASSERT_TRUE(item.finish);
      ASSERT_FALSE(item.fold);
    } else {
      ASSERT_LT(item.partial, s_.header->partials);
    }
    if (item.fold) {
      Slot& slot = slots_[static_cast<std::size_t>(item.partial)];
      ASSERT_TRUE(slot.live);
      ASSERT_EQ(slot.unit, key);
      ASSERT_EQ(slot.worker, worker);
      ASSERT_EQ(slot.range.end, item.kv_begin) << "folds must follow KV order";
      state.begin = slot.range.begin;
      slot.live = false;
    }
    if (item.finish) {
      ASSERT_EQ(state.begin, unit.range.begin);
      ASSERT_EQ(state.end, unit.range.end);
      ++unit.finished;
    } else {
      Slot& slot = slots_[static_cast<std::size_t>(item.partial)];
      ASSERT_FALSE(slot.live) << "slot " << item.partial << " is taken";
      slot = {true, key, state, worker};
    }
  }

  void play_merge(const MergeItem& merge) {
    const UnitKey key{merge.request, merge.kv_head, merge.row_begin};
    const auto found = units_.find(key);
    ASSERT_NE(found, units_.end());
    Unit& unit = found->second;
    ASSERT_EQ(merge.row_end, unit.row_end);
    ASSERT_GE(merge.parts, 2);
    std::int32_t at = unit.range.begin;
    for (std::int32_t i = 0; i < merge.parts; ++i) {
      ASSERT_LT(merge.slot + i, s_.header->partials);
      Slot& slot = slots_[static_cast<std::size_t>(merge.slot + i)];
      ASSERT_TRUE(slot.live) << "part " << i;
      ASSERT_EQ(slot.unit, key);
      ASSERT_EQ(slot.range.begin, at) << "parts must follow KV order";
      if (s_.params.absolute && i > 0) {
        ASSERT_EQ((slot.range.end - 1) >> s_.params.step_log2, slot.range.begin >> s_.params.step_log2);
      }
      at = slot.range.end;
      slot.live = false;
    }
    ASSERT_EQ(at, unit.range.end);
    unit.merged = true;
    ++unit.finished;
  }

  void check_units() {
    ASSERT_EQ(s_.header->units, static_cast<std::int64_t>(units_.size()));
    const std::int32_t step = 1 << s_.params.step_log2;
    for (auto& [key, unit] : units_) {
      SCOPED_TRACE(fmt::format("request {}, KV head {}, row {}", std::get<0>(key), std::get<1>(key),
                               std::get<2>(key)));
      ASSERT_EQ(unit.finished, 1) << "outputs are written once";
      ASSERT_FALSE(unit.items.empty());
      ASSERT_EQ(unit.items.front().begin, unit.range.begin);
      ASSERT_EQ(unit.items.back().end, unit.range.end);
      for (std::size_t i = 1; i < unit.items.size(); ++i) {
        ASSERT_EQ(unit.items[i].begin, unit.items[i - 1].end) << "a gap or an overlap";
        ASSERT_EQ(unit.items[i].begin % step, 0) << "cuts lie at absolute multiples of a step";
      }
      if (s_.params.absolute && unit.range.end > 0) {  // all cuts there are, whatever the neighbours
        const auto splits =
            ((unit.range.end - 1) >> s_.params.step_log2) - (unit.range.begin >> s_.params.step_log2) + 1;
        ASSERT_EQ(static_cast<std::int32_t>(unit.items.size()), splits);
      }
    }
  }

  const Built& built_;
  const Schedule& s_;
  std::map<UnitKey, Unit> units_;
  std::vector<Slot> slots_;
  std::vector<std::int64_t> step_positions_;
  std::int64_t least_ = INT64_MAX;
  std::int64_t most_ = 0;
};

/// Every property of the schedule for these requests; `slack` widens the bounds.
inline void check(const ScheduleParams& params, const std::vector<Request>& requests,
                  std::int32_t slack = 0) {
  const Built built(params, requests, slack);
  ASSERT_TRUE(built.guards_intact());
  Player(built, requests).play();
}

}  // namespace halftone::schedule_play
