#include "tests/emulator/machine.h"

#include <algorithm>
#include <cstring>

namespace halftone::emulator {
namespace {

constexpr std::uint64_t kPoison = 0x7fff7fff7fff7fff;  // NaN in fp32, bf16, f16 and e4m3's upper codes
constexpr int kSlice = 400;                            // instructions of a warp in a row, at most

}  // namespace

// --- Memory ---

Memory& memory() {
  static Memory only;
  return only;
}

void Memory::add(const void* begin, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uint64_t>(begin);
  ends_[at] = at + bytes;
}

void Memory::remove(const void* begin) {
  ends_.erase(reinterpret_cast<std::uint64_t>(begin));
  begin_ = end_ = 0;
}

bool Memory::holds(std::uint64_t address, std::size_t bytes) const {
  const auto within = [&] { return address >= begin_ && address < end_ && bytes <= end_ - address; };
  if (within()) return true;
  auto next = ends_.upper_bound(address);
  if (next == ends_.begin()) return false;
  --next;
  begin_ = next->first;
  end_ = next->second;
  return within();
}

std::uint8_t* global_bytes(std::uint64_t address, std::size_t bytes) {
  if (!memory().holds(address, bytes)) throw Fault("an access outside of every allocation");
  return reinterpret_cast<std::uint8_t*>(address);  // NOLINT(performance-no-int-to-ptr)
}

std::uint8_t* shared_bytes(Block& block, std::uint32_t address, std::size_t bytes) {
  Block& owner = address >> kOffsetBits == 0 ? block : block.cluster->block_of(address, block);
  const std::uint32_t offset = address & kOffsetMask;
  if (offset + bytes > owner.bytes) throw Fault("an access behind the end of shared memory");
  return owner.shared() + offset;
}

std::uint8_t* generic_bytes(Warp& warp, std::uint64_t address, std::size_t bytes) {
  const std::vector<std::uint64_t>& params = warp.block->cluster->machine->launch.params;
  const auto within = [&](const void* begin, std::size_t size) {
    const auto first = reinterpret_cast<std::uint64_t>(begin);
    return address >= first && address + bytes <= first + size;
  };
  if (!within(params.data(), params.size() * 8) && !within(warp.block->shared(), warp.block->bytes)) {
    return global_bytes(address, bytes);
  }
  return reinterpret_cast<std::uint8_t*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// --- Barriers ---

ArrivalBarrier& Block::barrier(std::uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) throw Fault("an mbarrier that was not initialised");
  return found->second;
}

namespace {

void end_phase(ArrivalBarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.expected;
  ++b.phase;
}

}  // namespace

void arrive(Block& block, std::uint32_t address, int arrivals, std::int64_t announced) {
  ArrivalBarrier& b = block.barrier(address);
  b.bytes += announced;
  b.pending -= arrivals;
  if (b.pending < 0) throw Fault("more arrivals at an mbarrier than it expects");
  end_phase(b);
}

void complete_bytes(Block& block, std::uint32_t address, std::int64_t bytes) {
  ArrivalBarrier& b = block.barrier(address);
  b.bytes -= bytes;
  end_phase(b);
}

Block& Cluster::block_of(std::uint32_t address, Block& own) {
  const std::uint32_t rank = address >> kOffsetBits;
  if (rank == 0) return own;
  if (rank > blocks.size()) throw Fault("an address in a block that the cluster does not have");
  return blocks[rank - 1];
}

// --- A launch ---

namespace {
void expect_none(const std::vector<Copy>& copies) {
  if (copies.empty()) return;
  throw Fault("a block ended before a copy that it did not wait for: " +
              std::string(copies.front().by->text));
}
}  // namespace

Machine::Machine(const Launch& l, int processors, std::uint64_t seed)
    : launch(l), processors_(processors), random_(seed), copy_rounds_(random_() % 2 != 0 ? 2 : 16) {
  if (launch.threads() % kLanes != 0) throw Fault("a block of no whole number of warps");
}

void Machine::run() {
  std::vector<std::unique_ptr<Cluster>> running;
  int next = 0;
  while (next < launch.blocks() || !running.empty()) {
    while (next < launch.blocks() && static_cast<int>(running.size()) * launch.cluster < processors_) {
      running.push_back(start(next));
      next += launch.cluster;
    }
    bool progress = false;
    for (std::unique_ptr<Cluster>& cluster : running) {
      bool advanced = false;
      for (Block& block : cluster->blocks) {
        const auto count = block.warps.size();
        const std::size_t first = random_() % count;
        for (std::size_t n = 0; n < count; ++n) {
          Warp& warp = block.warps[(first + n) % count];
          if (warp.live != 0) advanced |= advance(warp, 1 + static_cast<int>(random_() % kSlice));
        }
      }
      // Copies that a barrier counts end early, late, and when nothing else can go on; what a warp waits for
      // ends there.
      const bool all = !advanced;
      advanced |= finish(cluster->copies, [&](const Copy&) { return all || random_() % copy_rounds_ == 0; });
      progress |= advanced;
    }
    std::erase_if(running, [&](std::unique_ptr<Cluster>& cluster) {
      for (const Block& block : cluster->blocks) {
        for (const Warp& warp : block.warps) {
          if (warp.live != 0) return false;
        }
      }
      expect_none(cluster->copies);
      for (const Block& block : cluster->blocks) {
        for (const Warp& warp : block.warps) {
          for (const std::vector<Copy>& copies : warp.copies) expect_none(copies);
        }
      }
      progress = true;
      return true;
    });
    if (!progress) throw Fault("every warp waits:\n" + deadlock(*running.front()));
  }
}

std::unique_ptr<Cluster> Machine::start(int first_block) {
  auto cluster = std::make_unique<Cluster>();
  cluster->machine = this;
  cluster->blocks.resize(static_cast<std::size_t>(launch.cluster));
  for (int rank = 0; rank < launch.cluster; ++rank) {
    Block& block = cluster->blocks[static_cast<std::size_t>(rank)];
    block.cluster = cluster.get();
    block.index = first_block + rank;
    block.rank = rank;
    block.bytes = launch.shared_bytes + launch.program->static_shared;
    block.memory.assign((block.bytes + 7) / 8, kPoison);
    block.warps.resize(static_cast<std::size_t>(launch.threads() / kLanes));
    for (std::size_t n = 0; n < block.warps.size(); ++n) {
      block.warps[n].block = &block;
      block.warps[n].index = static_cast<int>(n);
      start_warp(block.warps[n]);
    }
  }
  return cluster;
}

namespace {

/// x, y or z (axis 0, 1, 2) of the thread or block with this number.
std::uint64_t along(const Launch::Size& size, int number, std::uint64_t axis) {
  for (std::uint64_t n = 0; n < axis; ++n) number /= size[n];
  return static_cast<std::uint64_t>(number % size.at(axis));
}

}  // namespace

void Machine::start_warp(Warp& warp) {
  warp.file.assign((launch.program->register_bytes + 7) / 8, kPoison);
  warp.groups = {{0, kAllLanes, false}};
  for (const Preset& p : launch.program->presets) {
    for (int lane = 0; lane < kLanes; ++lane) {
      std::uint64_t x = p.value;
      switch (p.source) {
        case Preset::kConstant:
          break;
        case Preset::kParams:
          x += reinterpret_cast<std::uint64_t>(launch.params.data());
          break;
        case Preset::kThread:
          x = along(launch.block, warp.index * kLanes + lane, p.value);
          break;
        case Preset::kThreads:
          x = static_cast<std::uint64_t>(launch.block.at(p.value));
          break;
        case Preset::kBlock:
          x = along(launch.grid, warp.block->index, p.value);
          break;
        case Preset::kBlocks:
          x = static_cast<std::uint64_t>(launch.grid.at(p.value));
          break;
        case Preset::kRank:
          x = static_cast<std::uint64_t>(warp.block->rank);
          break;
        case Preset::kLane:
          x = static_cast<std::uint64_t>(lane);
          break;
      }
      std::uint8_t* at = warp.registers() + p.place;
      p.wide ? Lanes<std::uint64_t>{reinterpret_cast<std::uint64_t*>(at)}.set(lane, x)
             : Lanes<std::uint32_t>{reinterpret_cast<std::uint32_t*>(at)}.set(lane,
                                                                              static_cast<std::uint32_t>(x));
    }
  }
}

// --- A warp: its groups of lanes, the one that is furthest behind first, so that they meet again ---

namespace {

/// Brings the runnable group that is furthest behind to the front; those at the same instruction become one.
/// False if every group is stuck.
bool choose(Warp& warp) {
  std::vector<Group>& groups = warp.groups;
  std::ranges::stable_sort(groups, {}, &Group::at);
  for (std::size_t n = 1; n < groups.size();) {
    if (groups[n].at == groups[n - 1].at) {
      groups[n - 1].lanes |= groups[n].lanes;
      groups[n - 1].stuck = false;
      groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(n));
    } else {
      ++n;
    }
  }
  const auto first = std::ranges::find(groups, false, &Group::stuck);
  if (first == groups.end()) return false;
  std::rotate(groups.begin(), first, first + 1);
  return true;
}

}  // namespace

bool Machine::advance(Warp& warp, int budget) {
  for (Group& group : warp.groups) group.stuck = false;
  // Any may begin: a group that polls must not keep the others from what it polls for.
  if (warp.groups.size() > 1) {
    std::ranges::rotate(warp.groups,
                        warp.groups.begin() + static_cast<std::ptrdiff_t>(random_() % warp.groups.size()));
  }
  bool progress = false;
  while (budget > 0 && warp.live != 0) {
    if (warp.groups.front().stuck && !choose(warp)) break;
    if (execute(warp)) {
      progress = true;
      --budget;
    }
  }
  return progress;
}

bool Machine::execute(Warp& warp) {
  Group& group = warp.groups.front();
  const Program& program = *launch.program;
  if (group.at >= program.code.size()) throw Fault("a kernel ran behind its end");
  const Instruction& i = program.code[group.at];
  Mask lanes = group.lanes;
  if (i.guarded) lanes &= i.inverted ? ~warp.predicate(i.guard) : warp.predicate(i.guard);
  ++executed;
  const auto go_on = [&](std::uint32_t at) {
    group.at = at;
    for (std::size_t n = 1; n < warp.groups.size(); ++n) {
      if (warp.groups[n].at <= at) {
        choose(warp);
        break;
      }
    }
    return true;
  };
  switch (i.kind) {
    case Kind::kBranch:
      if (lanes == 0) return go_on(group.at + 1);
      if (lanes == group.lanes) return go_on(i.target);
      group.lanes &= ~lanes;
      ++group.at;
      warp.groups.push_back({i.target, lanes, false});
      choose(warp);
      return true;
    case Kind::kExit:
      warp.live &= ~lanes;
      group.lanes &= ~lanes;
      ++group.at;
      if (group.lanes == 0) {
        warp.groups.erase(warp.groups.begin());
        if (!warp.groups.empty()) choose(warp);
      }
      return true;
    case Kind::kOther:
      break;
  }
  if (lanes == 0) return go_on(group.at + 1);
  try {
    if (i.together) {
      Mask needed = warp.live;
      if (i.member_mask >= 0) {
        needed &= static_cast<Mask>(warp.word(i, i.member_mask, first_lane(lanes)));
        if ((lanes & ~needed) != 0) lanes &= needed;
      }
      if ((needed & ~lanes) != 0) {
        group.stuck = true;
        return false;
      }
    }
    if (i.run(warp, i, lanes) == Outcome::kWait) {
      group.stuck = true;
      return false;
    }
  } catch (const Fault& fault) {
    throw Fault(std::string(fault.what()) + ": block " + std::to_string(warp.block->index) + ", warp " +
                std::to_string(warp.index) + ", lanes " + std::to_string(lanes) + ", line " +
                std::to_string(i.line) + " of " + program.path + ": " + std::string(i.text));
  }
  return go_on(group.at + 1);
}

void finish(Copy& copy) {
  try {
    copy.finish();
  } catch (const Fault& fault) {
    throw Fault(std::string(fault.what()) + ": line " + std::to_string(copy.by->line) + ": " +
                std::string(copy.by->text));
  }
}

Outcome run_nothing(Warp&, const Instruction&, Mask) { return Outcome::kNext; }

std::string Machine::deadlock(const Cluster& cluster) const {
  std::string text;
  for (const Block& block : cluster.blocks) {
    for (const Warp& warp : block.warps) {
      for (const Group& group : warp.groups) {
        const Instruction& i = launch.program->code[group.at];
        text += "  block " + std::to_string(block.index) + ", warp " + std::to_string(warp.index) +
                ", line " + std::to_string(i.line) + ": " + std::string(i.text) + "\n";
      }
    }
  }
  return text;
}

}  // namespace halftone::emulator
