// What the lanes of a warp, the warps of a block and the blocks of a cluster do together.
#include <algorithm>

#include "tests/emulator/machine.h"
#include "tests/emulator/statement.h"

namespace halftone::emulator {
namespace {

using Text = std::string_view;

enum Shuffle { kUp, kDown, kButterfly, kIndex };

/// d[|p] = a of the lane that b and c name. Sources that do not execute give garbage: poison.
template <Shuffle kHow>
Outcome run_shuffle(Warp& w, const Instruction& i, Mask m) {
  const int values = static_cast<int>(i.immediate);  // operand of a; before it d and maybe p
  const auto d = w.lanes<std::uint32_t>(i, 0), a = w.lanes<std::uint32_t>(i, values),
             b = w.lanes<std::uint32_t>(i, values + 1), c = w.lanes<std::uint32_t>(i, values + 2);
  std::uint32_t result[kLanes];
  Mask inside = 0;
  each(m, [&](int lane) {
    const int by = static_cast<int>(b[lane] & 31), clamp = static_cast<int>(c[lane] & 31);
    const int segment = static_cast<int>(c[lane] >> 8 & 31);
    const int highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment;
    int from = kHow == kUp          ? lane - by
               : kHow == kDown      ? lane + by
               : kHow == kButterfly ? lane ^ by
                                    : lowest | (by & ~segment);
    const bool within = kHow == kUp ? from >= highest : from <= highest;
    if (!within) from = lane;
    inside |= static_cast<Mask>(within) << lane;
    result[lane] = (m >> from & 1) != 0 ? a[from] : 0xdeadbeefu;
  });
  each(m, [&](int lane) { d.set(lane, result[lane]); });
  if (values == 2 && i.operands[1] != kNone) w.set_predicate(i, 1, m, inside);
  return Outcome::kNext;
}

bool decode_shuffle(const Statement& s, Operands& o, Instruction& to) {
  const std::size_t count = s.operands.size();
  to.run = s.has("up")     ? run_shuffle<kUp>
           : s.has("down") ? run_shuffle<kDown>
           : s.has("bfly") ? run_shuffle<kButterfly>
                           : run_shuffle<kIndex>;
  to.immediate = static_cast<std::int64_t>(count - 4);
  for (std::size_t n = 0; n < count; ++n)
    n < count - 4 ? o.write(s.operands[n]) : o.read(s.operands[n], "b32");
  to.member_mask = static_cast<std::int32_t>(count - 1);
  return true;
}

Outcome run_ballot(Warp& w, const Instruction& i, Mask m) {
  const Mask votes = w.predicate(i, 1) & m;
  const auto d = w.lanes<std::uint32_t>(i, 0);
  each(m, [&](int lane) { d.set(lane, votes); });
  return Outcome::kNext;
}
template <bool kAll>
Outcome run_vote(Warp& w, const Instruction& i, Mask m) {
  const Mask votes = w.predicate(i, 1) & m;
  const bool result = kAll ? votes == m : votes != 0;
  w.set_predicate(i, 0, m, result ? m : 0);
  return Outcome::kNext;
}

template <class T, class Op>
Outcome run_reduction(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<T>(i, 0), a = w.lanes<T>(i, 1);
  T x = a[first_lane(m)];
  each(m & (m - 1), [&](int lane) { x = Op{}(x, a[lane]); });
  each(m, [&](int lane) { d.set(lane, x); });
  return Outcome::kNext;
}
template <class T>
Run reduction(const Statement& s) {
  if (s.has("max")) return run_reduction<T, decltype([](T a, T b) { return std::max(a, b); })>;
  if (s.has("min")) return run_reduction<T, decltype([](T a, T b) { return std::min(a, b); })>;
  if (s.has("add")) return run_reduction<T, decltype([](T a, T b) { return static_cast<T>(a + b); })>;
  if (s.has("or")) return run_reduction<T, decltype([](T a, T b) { return static_cast<T>(a | b); })>;
  if (s.has("and")) return run_reduction<T, decltype([](T a, T b) { return static_cast<T>(a & b); })>;
  return nullptr;
}

// --- Barriers of the block: a warp counts as 32 threads ---

void arrive_at(ThreadBarrier& barrier, int threads, int needed) {
  barrier.arrived += threads;
  if (barrier.arrived > needed) throw Fault("more threads at a barrier than it has");
  if (barrier.arrived < needed) return;
  barrier.arrived = 0;
  barrier.result = barrier.any;
  barrier.any = false;
  ++barrier.phase;
}

ThreadBarrier& barrier_of(Warp& w, const Instruction& i, int operand, Mask m) {
  return w.block->thread_barriers.at(w.word(i, operand, first_lane(m)));
}
int threads_of(Warp& w, const Instruction& i, std::size_t operand, Mask m) {
  return i.operands.size() > operand ? static_cast<int>(w.word(i, static_cast<int>(operand), first_lane(m)))
                                     : w.block->cluster->machine->launch.threads();
}

Outcome run_bar_sync(Warp& w, const Instruction& i, Mask m) {
  ThreadBarrier& barrier = barrier_of(w, i, 0, m);
  if (!w.at_barrier) {
    w.at_barrier = true;
    w.barrier_phase = barrier.phase;
    arrive_at(barrier, kLanes, threads_of(w, i, 1, m));
  }
  if (barrier.phase == w.barrier_phase) return Outcome::kWait;
  w.at_barrier = false;
  return Outcome::kNext;
}
Outcome run_bar_arrive(Warp& w, const Instruction& i, Mask m) {
  arrive_at(barrier_of(w, i, 0, m), kLanes, threads_of(w, i, 1, m));
  return Outcome::kNext;
}
/// q, barrier, threads, p.
Outcome run_bar_or(Warp& w, const Instruction& i, Mask m) {
  ThreadBarrier& barrier = barrier_of(w, i, 1, m);
  if (!w.at_barrier) {
    w.at_barrier = true;
    w.barrier_phase = barrier.phase;
    barrier.any = barrier.any || (w.predicate(i, 3) & m) != 0;
    arrive_at(barrier, kLanes, threads_of(w, i, 2, m));
  }
  if (barrier.phase == w.barrier_phase) return Outcome::kWait;
  w.at_barrier = false;
  w.set_predicate(i, 0, m, barrier.result ? m : 0);
  return Outcome::kNext;
}

// --- The barrier of the cluster: arrive and wait apart ---

Outcome run_cluster_arrive(Warp& w, const Instruction&, Mask) {
  Cluster& cluster = *w.block->cluster;
  w.cluster_phase = cluster.barrier.phase;
  arrive_at(cluster.barrier, kLanes, cluster.machine->launch.threads() * cluster.machine->launch.cluster);
  return Outcome::kNext;
}
Outcome run_cluster_wait(Warp& w, const Instruction&, Mask) {
  return w.block->cluster->barrier.phase == w.cluster_phase ? Outcome::kWait : Outcome::kNext;
}

}  // namespace

bool decode_warp(const Statement& s, Operands& o, Instruction& to) {
  const Text name = s.parts[0];
  to.together = true;
  if (name == "shfl") return decode_shuffle(s, o, to);
  if (name == "vote") {
    to.run = s.has("ballot") ? run_ballot
             : s.has("all")  ? run_vote<true>
             : s.has("any")  ? run_vote<false>
                             : nullptr;
    o.write(s.operands[0]);
    o.read(s.operands[1], "pred");
    o.read(s.operands[2], "b32");
    to.member_mask = 2;
    return to.run != nullptr;
  }
  if (name == "redux") {
    to.run = s.type() == "s32" ? reduction<std::int32_t>(s) : reduction<std::uint32_t>(s);
    o.write(s.operands[0]);
    o.read(s.operands[1], "b32");
    o.read(s.operands[2], "b32");
    to.member_mask = 2;
    return to.run != nullptr;
  }
  if (s.opcode == "bar.warp.sync") {
    o.read(s.operands[0], "b32");
    to.run = run_nothing;
    to.member_mask = 0;
    return true;
  }
  if (name == "bar" && s.has("red")) {
    if (!s.has("or")) return false;
    o.write(s.operands[0]);
    o.read(s.operands[1], "b32");
    o.read(s.operands[2], "b32");
    o.read(s.operands[3], "pred");
    to.run = run_bar_or;
    return true;
  }
  if (name == "bar" || s.opcode == "barrier.sync") {
    for (const Text operand : s.operands) o.read(operand, "b32");
    to.run = s.has("arrive") ? run_bar_arrive : run_bar_sync;
    return true;
  }
  if (s.opcode.starts_with("barrier.cluster")) {
    to.run = s.has("arrive") ? run_cluster_arrive : run_cluster_wait;
    return true;
  }
  to.together = false;
  return false;
}

}  // namespace halftone::emulator
