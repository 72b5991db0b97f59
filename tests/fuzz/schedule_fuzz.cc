// plan() and schedule(): problem and lengths come from the bytes. Whatever the library accepts must cover
// every key that a query sees exactly once, in a workspace of exactly the stated size.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "fuzz_input.h"
#include "halftone/attention.h"
#include "plan/plan.h"
#include "plan/work.h"

namespace {

using namespace halftone;
using fuzz::require;
using planning::Schedule;

constexpr std::int64_t kMaxWorkspace = std::int64_t{1} << 20;  // larger plans are only planned
constexpr std::int64_t kMaxUnits = 20000;
constexpr std::int64_t kMaxWalk = 1000000;
constexpr std::int64_t kGuard = 256;
constexpr std::uint8_t kPoison = 0xa5;

/// Mostly sane problems; every field has a rare byte that makes it any 32-bit number.
AttentionProblem problem_from(fuzz::Input& in) {
  const auto integer = [&](std::int32_t low, std::int32_t high) {
    return in.rare() ? in.take<std::int32_t>() : in.range(low, high);
  };
  constexpr std::array<int, 7> kHeadDims = {64, 80, 96, 128, 192, 256, 512};
  constexpr std::array<int, 5> kPageSizes = {16, 32, 64, 128, 256};
  constexpr std::array<DType, 3> kFloats = {DType::kBFloat16, DType::kFloat32, DType::kFloat16};
  AttentionProblem p;
  p.batch = integer(0, 24);
  KvCacheSpec spec;
  spec.kv_heads = integer(1, 4);
  const std::int32_t group = integer(1, 40);
  p.q_heads = in.rare() ? in.take<std::int32_t>()
                        : static_cast<std::int32_t>(std::int64_t{group} * spec.kv_heads % 100000);
  spec.head_dim = in.pick(kHeadDims);
  spec.v_head_dim = in.flag() ? in.pick(kHeadDims) : 0;
  spec.page_size = in.rare() ? in.take<std::int32_t>() : in.pick(kPageSizes);
  const auto formats = named_formats();
  spec.k_format = formats[in.take<std::uint8_t>() % formats.size()].format;
  spec.v_format = formats[in.take<std::uint8_t>() % formats.size()].format;
  if (in.flag()) {
    p.kv = spec;
  } else {
    p.kv = KvTensors{in.pick(kFloats), spec.kv_heads, spec.head_dim, spec.v_head_dim};
  }
  p.q_dtype = in.pick(kFloats);
  p.out_dtype = in.pick(kFloats);
  p.max_q_len = in.flag() ? integer(0, 400) : integer(0, 8);
  p.max_kv_len = in.flag() ? integer(0, 20000) : integer(0, 300);
  p.mask.causal = in.flag();
  if (in.flag()) p.mask.window_left = integer(-1, 300);
  if (in.flag()) p.mask.window_right = integer(-1, 300);
  if (in.flag()) p.softcap = in.take<float>();
  if (in.flag()) p.scale = in.take<float>();
  const std::uint8_t how = in.take<std::uint8_t>();
  p.policy = static_cast<SplitPolicy>(how % 3);
  if (how >= 192) p.min_q_len = std::max(p.max_q_len, 1);
  p.workers = integer(0, 200);
  return p;
}

/// Lengths of one step: within the bounds but for rare bytes.
struct Lengths {
  std::vector<std::int32_t> cu_q, kv, cu_kv;
  bool has_cu_q = false;
  SequenceLengths view(const AttentionProblem& p) const {
    SequenceLengths s;
    const std::int64_t batch = p.batch;
    if (has_cu_q) s.cu_q = TensorView::contiguous(cu_q.data(), DType::kInt32, {batch + 1});
    if (p.is_paged()) {
      s.kv_lengths = TensorView::contiguous(kv.data(), DType::kInt32, {batch});
    } else {
      s.cu_kv = TensorView::contiguous(cu_kv.data(), DType::kInt32, {batch + 1});
    }
    return s;
  }
};

Lengths lengths_from(fuzz::Input& in, const AttentionProblem& p) {
  Lengths l;
  l.has_cu_q = in.flag();
  l.cu_q.push_back(0);
  l.cu_kv.push_back(0);
  const auto length = [&](std::int32_t max) {
    const std::uint8_t how = in.take<std::uint8_t>();
    if (how == 0xff) return in.take<std::int32_t>();
    if (how < 32) return 0;
    if (how < 96) return max;
    if (how >= 224) return std::min(max, 1);  // a single token, maybe beside prompts
    return in.range(0, std::min(max, 65535));
  };
  const auto sum = [](std::int32_t a, std::int32_t b) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
  };
  for (int r = 0; r < p.batch; ++r) {
    l.cu_q.push_back(sum(l.cu_q.back(), l.has_cu_q ? length(p.max_q_len) : p.max_q_len));
    l.kv.push_back(length(p.max_kv_len));
    l.cu_kv.push_back(sum(l.cu_kv.back(), l.kv.back()));
  }
  return l;
}

/// A workspace of exactly the stated size between two guards; the heap's own red zones lie behind them.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(std::int64_t bytes)
      : bytes_(bytes),
        memory_(static_cast<std::uint8_t*>(
            ::operator new (static_cast<std::size_t>(bytes + 2 * kGuard), std::align_val_t{kGuard}))) {
    std::memset(memory_.get(), kPoison, static_cast<std::size_t>(bytes + 2 * kGuard));
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(memory_.get() + kGuard); }
  TensorView view() const { return TensorView::contiguous(data(), DType::kUInt8, {bytes_}); }
  bool poisoned(std::int64_t from, std::int64_t to) const {
    return std::all_of(memory_.get() + kGuard + from, memory_.get() + kGuard + to,
                       [](std::uint8_t b) { return b == kPoison; });
  }
  bool guards_intact() const { return poisoned(-kGuard, 0) && poisoned(bytes_, bytes_ + kGuard); }

 private:
  struct Release {
    void operator()(std::uint8_t* p) const { ::operator delete (p, std::align_val_t{kGuard}); }
  };
  std::int64_t bytes_;
  std::unique_ptr<std::uint8_t, Release> memory_;
};

/// Keys [begin, end) of one unit, or of a part of it.
struct Keys {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  friend bool operator==(const Keys&, const Keys&) = default;
};

/// (request, KV head, first row).
using UnitId = std::tuple<std::int32_t, std::int32_t, std::int32_t>;

/// What the definition of the mask says that rows [row_begin, row_end) of a request see, begin rounded down
/// to 16.
Keys keys_of_rows(const AttentionProblem& p, std::int64_t q_len, std::int64_t kv_len, int row_begin,
                  int row_end) {
  const int group = p.q_heads / p.kv_heads();
  std::int64_t begin = kv_len, end = 0;
  for (std::int64_t q = row_begin / group; q <= (row_end - 1) / group; ++q) {
    const std::int64_t at = q + kv_len - q_len;
    std::int64_t from = 0, to = kv_len;
    if (p.mask.window_left >= 0) from = std::max<std::int64_t>(from, at - p.mask.window_left);
    if (p.mask.window_right >= 0) to = std::min(to, at + p.mask.window_right + 1);
    if (p.mask.causal) to = std::min(to, at + 1);
    if (from >= to) continue;
    begin = std::min(begin, from);
    end = std::max(end, to);
  }
  if (begin >= end) return {};
  return {static_cast<std::int32_t>(begin / 16 * 16), static_cast<std::int32_t>(end)};
}

/// Plays a pass's schedule as a backend would, with key ranges in place of partial results.
class Replay {
 public:
  Replay(const AttentionProblem& problem, const PlanInfo& plan, const PassInfo& info,
         const Schedule& schedule)
      : plan_(plan), info_(info), schedule_(schedule), slots_(static_cast<std::size_t>(info.max_partials)) {
    for (std::int32_t r = 0; r < problem.batch; ++r) {
      const std::int32_t q_len = schedule.cu_q[r + 1] - schedule.cu_q[r];
      const std::int32_t rows = q_len * plan.group;
      if (rows < info.min_rows || rows > info.max_rows) continue;
      ++requests_;
      for (std::int32_t head = 0; head < problem.kv_heads(); ++head) {
        for (std::int32_t row = 0; row < rows; row += info.row_block) {
          const std::int32_t end = std::min(rows, row + info.row_block);
          units_[{r, head, row}] = {end, keys_of_rows(problem, q_len, schedule.kv_lengths[r], row, end)};
        }
      }
    }
  }

  void run() {
    std::int64_t least = INT64_MAX, most = 0, idle = 0;
    for (std::int32_t w = 0; w < plan_.workers; ++w) {
      const std::int64_t steps = run_worker(w);
      idle += steps == 0;
      least = steps == 0 ? least : std::min(least, steps);
      most = std::max(most, steps);
    }
    require(most == 0 || most - least <= 1, "workers are balanced within one step");
    require(most <= 1 || idle * 16 <= plan_.workers, "few workers are idle while others have several steps");
    for (std::int32_t w = 0; w < plan_.workers; ++w) merge(w);
    require(written_ == units_.size(), "every unit is written");
    for (const Slot& s : slots_) require(!s.used, "every partial result is merged");
  }
  /// That the pass serves.
  std::int32_t requests() const { return requests_; }

 private:
  struct Unit {
    std::int32_t row_end = 0;
    Keys keys;
    bool written = false;
  };
  struct Slot {
    bool used = false;
    UnitId unit;
    Keys keys;
  };

  Slot& slot(std::int32_t index) {
    require(index >= 0 && index < info_.max_partials, "slots fit into the workspace");
    return slots_[static_cast<std::size_t>(index)];
  }

  Unit& unit(const UnitId& id, std::int32_t row_end) {
    const auto it = units_.find(id);
    require(it != units_.end() && it->second.row_end == row_end, "an item is a row block of a request");
    return it->second;
  }

  void write(Unit& unit, const Keys& keys) {
    require(!unit.written, "a unit is written once");
    require(keys == unit.keys, "a unit sees its keys exactly once, and no others");
    unit.written = true;
    ++written_;
  }

  std::int64_t run_worker(std::int32_t w) {
    std::int64_t steps = 0;
    planning::WorkCursor cursor(schedule_, w);
    for (planning::WorkItem item; cursor.next(item);) {
      const UnitId id{item.request, item.kv_head, item.row_begin};
      Unit& owner = unit(id, item.row_end);
      Keys keys{item.kv_begin, item.kv_end};
      const std::int32_t log2 = schedule_.params.step_log2;
      const std::int32_t taken = keys == Keys{} ? 1 : ((keys.end - 1) >> log2) - (keys.begin >> log2) + 1;
      require(taken >= 1 && (!schedule_.params.absolute || taken == 1),
              "an item is whole steps, or one split");
      require(keys == Keys{} || keys.begin % 16 == 0, "items begin at tiles");
      steps += taken;
      if (item.fold) {
        const Slot& before = slot(item.partial);
        require(before.used && before.unit == id && before.keys.end == keys.begin,
                "folds go forward in KV order");
        keys.begin = before.keys.begin;
      }
      if (item.finish) {
        if (item.fold) slot(item.partial).used = false;
        write(owner, keys);
      } else {
        Slot& to = slot(item.partial);
        require(item.fold || !to.used, "a slot is filled once");
        to = {true, id, keys};
      }
    }
    return steps;
  }

  void merge(std::int32_t w) {
    planning::MergeItem item;
    if (!planning::merge_item(schedule_, w, item)) return;
    require(item.parts >= 2, "a merge has parts");
    const UnitId id{item.request, item.kv_head, item.row_begin};
    Keys keys;
    for (std::int32_t part = 0; part < item.parts; ++part) {
      Slot& from = slot(item.slot + part);
      require(from.used && from.unit == id, "a merge reads its own unit's slots");
      require(part == 0 || from.keys.begin == keys.end, "parts are in KV order");
      if (part == 0) keys.begin = from.keys.begin;
      keys.end = from.keys.end;
      from.used = false;
    }
    write(unit(id, item.row_end), keys);
  }

  const PlanInfo& plan_;
  const PassInfo& info_;
  const Schedule& schedule_;
  std::map<UnitId, Unit> units_;
  std::vector<Slot> slots_;
  std::size_t written_ = 0;
  std::int32_t requests_ = 0;
};

void check_schedule(const Plan& plan, const Lengths& lengths) {
  const PlanInfo& info = plan.info();
  const GuardedWorkspace workspace(info.workspace_bytes);
  const bool ok = fuzz::accepted([&] { schedule(plan, lengths.view(plan.problem()), workspace.view()); });
  require(workspace.guards_intact(), "nothing is written outside the workspace");
  require(workspace.poisoned(ok ? info.schedule_bytes : 0, info.workspace_bytes),
          "schedule() writes its part, and nothing when it refuses");
  if (!ok) return;
  const planning::Workspace parts = planning::carve_workspace(*plan.impl(), workspace.data());
  std::int32_t requests = 0;
  for (std::size_t i = 0; i < info.passes.size(); ++i) {
    Replay replay(plan.problem(), info, info.passes[i], parts.passes[i].schedule);
    replay.run();
    requests += replay.requests();
  }
  const std::int32_t* cu_q = parts.passes[0].schedule.cu_q;
  for (std::int32_t r = 0; r < plan.problem().batch; ++r) requests -= cu_q[r + 1] > cu_q[r] ? 1 : 0;
  require(requests == 0, "every request with queries is in one pass");
  require(workspace.guards_intact(), "reading a schedule writes nothing");

  const std::string first(reinterpret_cast<const char*>(workspace.data()), info.schedule_bytes);
  schedule(plan, lengths.view(plan.problem()), workspace.view());
  require(std::memcmp(first.data(), workspace.data(), first.size()) == 0, "schedule() repeats its bytes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input in(data, size);
  const AttentionProblem problem = problem_from(in);
  Plan plan;
  if (!fuzz::accepted([&] { plan = halftone::plan(problem); })) return 0;
  require(!plan.describe().empty(), "a plan describes itself");
  const PlanInfo& info = plan.info();
  require(info.schedule_bytes > 0 && info.schedule_bytes <= info.workspace_bytes,
          "a schedule is part of a workspace");
  if (info.workspace_bytes > kMaxWorkspace || info.max_units > kMaxUnits) return 0;
  const std::int64_t heads = std::int64_t{problem.batch} * problem.kv_heads();
  if (heads > kMaxUnits) return 0;  // many of no query
  // With a window every worker walks the row blocks of its request from the first one.
  if (heads > 0 && info.max_units / heads * info.workers > kMaxWalk) return 0;
  for (int step = 0; step < 3 && (step == 0 || !in.empty()); ++step)
    check_schedule(plan, lengths_from(in, problem));
  return 0;
}
