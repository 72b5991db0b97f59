// mbarriers and the copies that run beside the warps: cp.async, bulk and tensor copies.
#include <algorithm>
#include <array>
#include <cstring>

#include "tests/emulator/machine.h"
#include "tests/emulator/statement.h"
#include "tests/emulator/tensor_map.h"

namespace halftone::emulator {
namespace {

using Text = std::string_view;

std::uint32_t address_of(Warp& w, const Instruction& i, int operand, int lane) {
  return static_cast<std::uint32_t>(w.word(i, operand, lane) + static_cast<std::uint64_t>(i.immediate));
}

// --- mbarriers ---

Outcome run_init(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) {
    const std::uint32_t at = address_of(w, i, 0, lane);
    shared_bytes(*w.block, at, 8);
    const int expected = static_cast<int>(w.word(i, 1, lane));
    w.block->barriers[at & kOffsetMask] = {expected, expected, 0, 0};
  });
  return Outcome::kNext;
}
/// operand 0: "_"; 1: address; maybe 2: bytes or arrivals.
template <bool kBytes>
Outcome run_arrive(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) {
    const std::uint32_t at = address_of(w, i, 1, lane);
    const int more = i.operands.size() > 2 ? static_cast<int>(w.word(i, 2, lane)) : 0;
    arrive(w.block->cluster->block_of(at, *w.block), at & kOffsetMask, kBytes || more == 0 ? 1 : more,
           kBytes ? more : 0);
  });
  return Outcome::kNext;
}
Outcome run_expect(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) {
    const std::uint32_t at = address_of(w, i, 0, lane);
    arrive(w.block->cluster->block_of(at, *w.block), at & kOffsetMask, 0,
           static_cast<std::int64_t>(w.word(i, 1, lane)));
  });
  return Outcome::kNext;
}
/// done, address, parity. A barrier in phase p has passed parity (p - 1) & 1.
template <bool kWaits>
Outcome run_test(Warp& w, const Instruction& i, Mask m) {
  Mask done = 0;
  each(m, [&](int lane) {
    const std::uint32_t at = address_of(w, i, 1, lane);
    const bool passed = (w.block->barrier(at & kOffsetMask).phase & 1) != (w.word(i, 2, lane) & 1);
    done |= static_cast<Mask>(passed) << lane;
  });
  if (kWaits && done != m) return Outcome::kWait;
  w.set_predicate(i, 0, m, done);
  return Outcome::kNext;
}

bool decode_barrier(const Statement& s, Operands& o, Instruction& to) {
  const Text what = s.parts[1];
  if (what == "init") {
    o.address(s.operands[0]);
    o.read(s.operands[1], "b32");
    to.run = run_init;
  } else if (what == "arrive") {
    o.write(s.operands[0]);
    o.address(s.operands[1]);
    if (s.operands.size() > 2) o.read(s.operands[2], "b32");
    to.run = s.has("expect_tx") ? run_arrive<true> : run_arrive<false>;
    return s.operands[0] == "_" && !s.has("noComplete");
  } else if (what == "expect_tx") {
    o.address(s.operands[0]);
    o.read(s.operands[1], "b32");
    to.run = run_expect;
  } else if ((what == "try_wait" || what == "test_wait") && s.has("parity")) {
    o.write(s.operands[0]);
    o.address(s.operands[1]);
    o.read(s.operands[2], "b32");
    to.run = what == "try_wait" ? run_test<true> : run_test<false>;
  } else {
    return false;
  }
  return true;
}

// --- cp.async: to, from, size, bytes that exist ---

void begin(Warp& w, const Instruction& i, Copy::Kind kind, int lane, std::function<void()> work) {
  if (kind == Copy::kCounted) {
    w.block->cluster->copies.push_back({lane, 0, &i, std::move(work)});
  } else {
    w.copies[kind].push_back(
        {lane, w.groups_begun[kind][static_cast<std::size_t>(lane)], &i, std::move(work)});
  }
}

Outcome run_copy_async(Warp& w, const Instruction& i, Mask m) {
  const auto size = static_cast<std::size_t>(w.word(i, 2, first_lane(m)));
  each(m, [&](int lane) {
    const auto to =
        static_cast<std::uint32_t>(w.word(i, 0, lane) + static_cast<std::uint64_t>(i.immediate & 0xffffffff));
    const std::uint64_t from = w.word(i, 1, lane) + static_cast<std::uint64_t>(i.immediate >> 32);
    const auto present = static_cast<std::size_t>(i.operands.size() > 3 ? w.word(i, 3, lane) : size);
    if (present > size) throw Fault("cp.async of more bytes than it copies");
    if (to % size != 0 || from % size != 0) throw Fault("cp.async to or from what is not aligned");
    std::uint8_t* d = shared_bytes(*w.block, to, size);
    const std::uint8_t* a = present == 0 ? nullptr : global_bytes(from, present);
    begin(w, i, Copy::kAsync, lane, [=] {
      std::memset(d, 0, size);
      if (present != 0) std::memcpy(d, a, present);
    });
  });
  return Outcome::kNext;
}

/// Finishes the lanes' copies of this kind whose groups are not among their last `pending`; `open`: those of
/// no group yet as well.
void finish_groups(Warp& w, Copy::Kind kind, Mask lanes, int pending, bool open) {
  const std::array<int, kLanes>& begun = w.groups_begun[kind];
  finish(w.copies[kind], [&](const Copy& c) {
    return (lanes >> c.lane & 1) != 0 &&
           (open || c.group < begun[static_cast<std::size_t>(c.lane)] - pending);
  });
}

template <Copy::Kind kKind>
Outcome run_commit(Warp& w, const Instruction&, Mask m) {
  each(m, [&](int lane) { ++w.groups_begun[kKind][static_cast<std::size_t>(lane)]; });
  return Outcome::kNext;
}
/// The immediate: how many groups may still run; -1: none, and no copy outside of a group.
template <Copy::Kind kKind>
Outcome run_wait(Warp& w, const Instruction& i, Mask m) {
  const bool all = i.immediate < 0;
  finish_groups(w, kKind, m, all ? 0 : static_cast<int>(i.immediate), all);
  return Outcome::kNext;
}

/// Arrives behind the lane's copies so far: they are finished first.
Outcome run_arrive_behind(Warp& w, const Instruction& i, Mask m) {
  finish_groups(w, Copy::kAsync, m, 0, true);
  each(m, [&](int lane) { arrive(*w.block, address_of(w, i, 0, lane) & kOffsetMask, 1, 0); });
  return Outcome::kNext;
}

// --- Bulk copies ---

/// to, from, bytes, barrier.
template <bool kFromShared>
Outcome run_bulk(Warp& w, const Instruction& i, Mask m) {
  Cluster& cluster = *w.block->cluster;
  each(m, [&](int lane) {
    const auto to = static_cast<std::uint32_t>(w.word(i, 0, lane));
    const auto bytes = static_cast<std::size_t>(w.word(i, 2, lane));
    const auto barrier = static_cast<std::uint32_t>(w.word(i, 3, lane));
    const std::uint64_t from = w.word(i, 1, lane);
    if (bytes % 16 != 0 || to % 16 != 0 || from % 16 != 0)
      throw Fault("a bulk copy that is not aligned to 16 bytes");
    std::uint8_t* d = shared_bytes(*w.block, to, bytes);
    const std::uint8_t* a = kFromShared ? shared_bytes(*w.block, static_cast<std::uint32_t>(from), bytes)
                                        : global_bytes(from, bytes);
    Block& counts = cluster.block_of(barrier, *w.block);
    if (&counts != &cluster.block_of(to, *w.block))
      throw Fault("a bulk copy whose barrier is in another block than its data");
    begin(w, i, Copy::kCounted, lane, [=, &counts] {
      std::memcpy(d, a, bytes);
      complete_bytes(counts, barrier & kOffsetMask, static_cast<std::int64_t>(bytes));
    });
  });
  return Outcome::kNext;
}

/// operands: to, map, coordinates, barrier [, blocks]. The immediate: coordinates, and 16 if multicast.
Outcome run_tensor_load(Warp& w, const Instruction& i, Mask m) {
  Cluster& cluster = *w.block->cluster;
  const int rank = static_cast<int>(i.immediate & 15);
  each(m, [&](int lane) {
    const auto to = static_cast<std::uint32_t>(w.word(i, 0, lane));
    const TensorMap map = TensorMap::at(generic_bytes(w, w.word(i, 1, lane), sizeof(TensorMap)), rank);
    std::array<std::int64_t, 5> at{};
    for (int n = 0; n < rank; ++n)
      at[static_cast<std::size_t>(n)] = static_cast<std::int32_t>(w.word(i, 2 + n, lane));
    const auto barrier = static_cast<std::uint32_t>(w.word(i, 2 + rank, lane));
    std::uint32_t blocks = 0;
    if ((i.immediate & 16) != 0) blocks = static_cast<std::uint32_t>(w.word(i, 3 + rank, lane)) & 0xffff;
    for (int block = 0; block < static_cast<int>(cluster.blocks.size()); ++block) {
      Block& target =
          blocks == 0 ? cluster.block_of(to, *w.block) : cluster.blocks[static_cast<std::size_t>(block)];
      if (blocks == 0 ? block > 0 : (blocks >> block & 1) == 0) continue;
      if (to % 128 != 0) throw Fault("a tensor copy to what is not 128-byte aligned");
      const std::uint32_t offset = to & kOffsetMask;
      const std::uint32_t bytes = map.box_bytes();
      shared_bytes(target, offset, bytes);
      begin(w, i, Copy::kCounted, lane, [=, &target] {
        map.copy(at, target.shared(), offset, TensorMap::kLoad);
        complete_bytes(target, barrier & kOffsetMask, bytes);
      });
    }
  });
  return Outcome::kNext;
}

/// operands: map, coordinates, from.
Outcome run_tensor_store(Warp& w, const Instruction& i, Mask m) {
  const int rank = static_cast<int>(i.immediate & 15);
  each(m, [&](int lane) {
    const TensorMap map = TensorMap::at(generic_bytes(w, w.word(i, 0, lane), sizeof(TensorMap)), rank);
    std::array<std::int64_t, 5> at{};
    for (int n = 0; n < rank; ++n)
      at[static_cast<std::size_t>(n)] = static_cast<std::int32_t>(w.word(i, 1 + n, lane));
    const auto from = static_cast<std::uint32_t>(w.word(i, 1 + rank, lane));
    if (from % 128 != 0) throw Fault("a tensor copy from what is not 128-byte aligned");
    shared_bytes(*w.block, from, map.box_bytes());
    begin(w, i, Copy::kBulk, lane,
          [=, block = w.block] { map.copy(at, block->shared(), from & kOffsetMask, TensorMap::kStore); });
  });
  return Outcome::kNext;
}

/// "[map, {x, y, z}]"
std::vector<Text> inside(Text operand) {
  std::vector<Text> parts;
  std::size_t begin = 1;
  for (std::size_t n = 1; n < operand.size(); ++n) {
    if (operand[n] != ',' && operand[n] != '{' && operand[n] != '}' && operand[n] != ']' && operand[n] != ' ')
      continue;
    if (n > begin) parts.push_back(operand.substr(begin, n - begin));
    begin = n + 1;
  }
  return parts;
}

bool decode_bulk(const Statement& s, Operands& o, Instruction& to) {
  if (s.has("commit_group")) return to.run = run_commit<Copy::kBulk>, true;
  if (s.has("wait_group")) {
    to.immediate = o.integer(s.operands[0]);
    to.run = run_wait<Copy::kBulk>;
    return true;
  }
  if (!s.has("tensor")) {
    if (s.has("multicast::cluster") || !s.has("mbarrier::complete_tx::bytes")) return false;
    for (std::size_t n = 0; n < 4; ++n) {
      if (n == 2) {
        o.read(s.operands[n], "b32");
      } else {
        o.address(s.operands[n]);
        if (to.immediate != 0) return false;  // there is room for one offset only
      }
    }
    to.run = s.has("global") ? run_bulk<false> : run_bulk<true>;
    return s.parts[3] == "shared::cluster";
  }
  const bool loads = s.has("mbarrier::complete_tx::bytes");
  if (!s.has("tile")) return false;
  const std::vector<Text> map = inside(s.operands[loads ? 1 : 0]);
  if (loads) o.address(s.operands[0]);
  o.read(map[0], "b64");
  for (std::size_t n = 1; n < map.size(); ++n) o.read(map[n], "b32");
  if (loads) o.address(s.operands[2]);
  if (!loads) o.address(s.operands[1]);
  if (to.immediate != 0) return false;
  to.immediate = static_cast<std::int64_t>(map.size() - 1);
  if (s.has("multicast::cluster")) {
    to.immediate |= 16;
    o.read(s.operands[3], "b16");
  }
  to.run = loads ? run_tensor_load : run_tensor_store;
  return true;
}

Outcome run_mapa(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) {
    const auto rank = static_cast<std::uint32_t>(w.word(i, 2, lane));
    w.set_word(i, 0, lane, (rank + 1) << kOffsetBits | (w.word(i, 1, lane) & kOffsetMask));
  });
  return Outcome::kNext;
}

}  // namespace

bool decode_copy(const Statement& s, Operands& o, Instruction& to) {
  if (s.parts[0] == "mbarrier") return decode_barrier(s, o, to);
  if (s.opcode.starts_with("mapa.shared::cluster.u32")) {
    o.write(s.operands[0]);
    o.read(s.operands[1], "b32");
    o.read(s.operands[2], "b32");
    to.run = run_mapa;
    return true;
  }
  if (s.opcode.starts_with("cp.async.bulk")) return decode_bulk(s, o, to);
  if (s.opcode == "cp.async.wait_all" || s.opcode == "cp.async.wait_group") {
    to.immediate = s.operands.empty() ? -1 : o.integer(s.operands[0]);
    to.run = run_wait<Copy::kAsync>;
    return true;
  }
  if (s.opcode == "cp.async.commit_group") return to.run = run_commit<Copy::kAsync>, true;
  if (s.opcode.starts_with("cp.async.mbarrier.arrive.noinc")) {
    o.address(s.operands[0]);
    to.run = run_arrive_behind;
    return true;
  }
  if (s.opcode == "cp.async.cg.shared.global" || s.opcode == "cp.async.ca.shared.global") {
    o.address(s.operands[0]);
    const std::int64_t first = to.immediate;
    to.immediate = 0;
    o.address(s.operands[1]);
    to.immediate = (to.immediate << 32) | (first & 0xffffffff);
    o.read(s.operands[2], "b32");
    if (s.operands.size() > 3) o.read(s.operands[3], "b32");
    to.run = run_copy_async;
    return true;
  }
  return false;
}

}  // namespace halftone::emulator
