#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/validate.h"

namespace halftone::planning {
namespace {

constexpr int kShownWorkers = 16;
constexpr int kShownUnits = 16;
constexpr int kBarWidth = 64;

char worker_mark(std::int32_t worker) {
  constexpr std::string_view kMarks = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  return kMarks[static_cast<std::size_t>(worker) % kMarks.size()];
}

std::string worker_line(const Schedule& s, std::int32_t worker) {
  std::int64_t items = 0, tokens = 0;
  std::int32_t partials = 0;
  WorkItem first{}, last{};
  WorkCursor cursor(s, worker);
  for (WorkItem item; cursor.next(item); ++items) {
    if (items == 0) first = item;
    last = item;
    tokens += item.kv_end - item.kv_begin;
    partials += item.partial >= 0 && !item.fold ? 1 : 0;
  }
  MergeItem merge{};
  const bool merges = merge_item(s, worker, merge);
  return fmt::format("  {:>6}  {:>10} {:>8} {:>12} {:>9} {:>7}  {}/{}:{} to {}/{}:{}\n", worker,
                     share_begin(s, worker + 1) - share_begin(s, worker), items, tokens, partials,
                     merges ? merge.parts : 0, first.request, first.kv_head, first.kv_begin, last.request,
                     last.kv_head, last.kv_end);
}

/// The first units, one line each; a column is a slice of the longest of them, its mark the worker that reads
/// it.
std::string unit_picture(const Schedule& s) {
  struct Unit {
    WorkItem item;
    std::vector<std::pair<std::int32_t, std::int32_t>> ends;  // (end of a part, worker)
  };
  std::vector<Unit> units;
  std::int32_t longest = 1;
  for (std::int32_t w = 0; w < s.header->active; ++w) {
    WorkCursor cursor(s, w);
    for (WorkItem item; cursor.next(item);) {
      const bool same = !units.empty() && units.back().item.request == item.request &&
                        units.back().item.kv_head == item.kv_head &&
                        units.back().item.row_begin == item.row_begin;
      if (!same && units.size() == kShownUnits) {
        w = s.header->active;
        break;
      }
      if (!same) units.push_back({item, {}});
      units.back().ends.emplace_back(item.kv_end, w);
      longest = std::max(longest, item.kv_end);
    }
  }
  std::string text = fmt::format(
      "The first {} units (request / KV head, packed rows); a column is {} keys, a mark the "
      "worker that reads them:\n",
      units.size(), (longest + kBarWidth - 1) / kBarWidth);
  const std::int32_t column = (longest + kBarWidth - 1) / kBarWidth;
  for (const Unit& unit : units) {
    std::string bar;
    std::size_t part = 0;
    for (std::int32_t key = 0; key < unit.ends.back().first; key += column) {
      while (part + 1 < unit.ends.size() && unit.ends[part].first <= key) ++part;
      bar += key + column <= unit.item.kv_begin ? '.' : worker_mark(unit.ends[part].second);
    }
    text += fmt::format("  {:>14}  |{}\n",
                        fmt::format("{}/{} {}-{}", unit.item.request, unit.item.kv_head, unit.item.row_begin,
                                    unit.item.row_end - 1),
                        bar.empty() ? std::string("(no keys: zeros)") : bar);
  }
  return text;
}

/// Who works on what in a pass.
std::string explain_schedule(const Schedule& s) {
  const ScheduleHeader& h = *s.header;
  std::string text =
      fmt::format("{} units, {} {} over {} of {} workers, {} queries, {} keys, {} partial results\n", h.units,
                  h.total_steps, s.params.absolute ? "splits" : "KV tiles", h.active, s.params.workers,
                  h.total_q, h.total_kv, h.partials);
  if (h.active == 0) return text;
  text +=
      fmt::format("\n  worker  {:>10}    items         keys  partials  merges  from request/KV head:key\n",
                  s.params.absolute ? "splits" : "tiles");
  for (std::int32_t w = 0; w < std::min(h.active, kShownWorkers); ++w) text += worker_line(s, w);
  if (h.active > kShownWorkers) text += fmt::format("  ... and {} more workers\n", h.active - kShownWorkers);
  return text + "\n" + unit_picture(s);
}

}  // namespace

std::string explain(const Plan& plan, const SequenceLengths& lengths) {
  const Plan::Impl& impl = require_plan(plan);
  validate_lengths(impl, lengths);
  // Schedules are a small part of a workspace, and its first: only that part is needed here.
  const auto bytes = static_cast<std::size_t>(carve_workspace(impl.workspace, nullptr).schedule_bytes);
  std::vector<std::byte> memory(bytes + kWorkspaceAlignment);
  const auto rest = reinterpret_cast<std::uintptr_t>(memory.data()) % kWorkspaceAlignment;
  const Workspace workspace = carve_workspace(impl.workspace, memory.data() + (kWorkspaceAlignment - rest));
  fill_schedules(impl, lengths, workspace);

  std::string text = plan.describe();
  const std::size_t passes = impl.passes().size();
  for (std::size_t i = 0; i < passes; ++i) {
    if (passes > 1) text += fmt::format("\nPass {} of {}, {}:", i + 1, passes, plan.info().passes[i].config);
    text += "\n" + explain_schedule(workspace.passes[i].schedule);
  }
  return text;
}

}  // namespace halftone::planning
