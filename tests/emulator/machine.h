// Warps, blocks and clusters while a kernel runs, and the copies that run beside them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/emulator/program.h"

namespace halftone::emulator {

/// What a kernel did that a GPU would not survive, or would answer with garbage.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Block;
struct Cluster;
class Machine;

/// The lanes' values of one register. Registers of 32 bits and less lie in words of 32 bits.
template <class T>
struct Lanes {
  using Word = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  Word* words;
  T operator[](int lane) const {
    if constexpr (sizeof(T) >= 4) {
      return std::bit_cast<T>(words[lane]);
    } else {
      return static_cast<T>(words[lane]);
    }
  }
  void set(int lane, T x) const {
    if constexpr (sizeof(T) >= 4) {
      words[lane] = std::bit_cast<Word>(x);
    } else {
      words[lane] = static_cast<std::uint32_t>(static_cast<std::int32_t>(x));  // signed ones extend
    }
  }
};

/// Lanes that are at the same instruction.
struct Group {
  std::uint32_t at = 0;
  Mask lanes = 0;
  bool stuck = false;  ///< until others have run
};

/// A copy that runs beside the warps: done when it likes, at the latest when someone waits for it.
struct Copy {
  enum Kind : std::uint8_t { kAsync, kBulk, kCounted };  ///< cp.async; bulk copies in groups; a barrier tells

  int lane = 0, group = 0;  ///< whose waiting ends it, if no barrier tells
  const Instruction* by = nullptr;
  std::function<void()> finish;
};

/// A fault names the instruction that began the copy.
void finish(Copy& copy);
/// Finishes the copies that `which` picks, from the first on; true if there were any.
template <class Which>
bool finish(std::vector<Copy>& copies, const Which& which) {
  auto kept = copies.begin();
  for (auto copy = copies.begin(); copy != copies.end(); ++copy) {
    if (which(*copy)) {
      finish(*copy);
    } else {
      if (kept != copy) *kept = std::move(*copy);
      ++kept;
    }
  }
  const bool any = kept != copies.end();
  copies.erase(kept, copies.end());
  return any;
}

struct Warp {
  Block* block = nullptr;
  int index = 0;
  std::vector<std::uint64_t> file;  ///< registers
  std::vector<Group> groups;        ///< groups.front() runs
  Mask live = kAllLanes;
  bool at_barrier = false;  ///< of the block; its lanes are counted
  std::uint32_t barrier_phase = 0, cluster_phase = 0;
  std::array<std::array<int, kLanes>, 2> groups_begun{};  ///< of copies: of cp.async, of bulk copies
  std::array<std::vector<Copy>, 2> copies;                ///< likewise

  std::uint8_t* registers() { return reinterpret_cast<std::uint8_t*>(file.data()); }
  template <class T>
  Lanes<T> lanes(const Instruction& i, int operand) {
    return {reinterpret_cast<typename Lanes<T>::Word*>(registers() +
                                                       i.operands[static_cast<std::size_t>(operand)])};
  }
  /// Predicates are masks.
  Mask& predicate(std::uint32_t place) { return *reinterpret_cast<Mask*>(registers() + place); }
  Mask predicate(const Instruction& i, int operand) {
    return predicate(i.operands[static_cast<std::size_t>(operand)]);
  }
  /// Of these lanes; those of the others stay.
  void set_predicate(const Instruction& i, int operand, Mask lanes, Mask values) {
    Mask& p = predicate(i.operands[static_cast<std::size_t>(operand)]);
    p = (p & ~lanes) | (values & lanes);
  }
  /// Operand of 32 or 64 bits, zero-extended.
  std::uint64_t word(const Instruction& i, int operand, int lane) {
    return i.wide[static_cast<std::size_t>(operand)] != 0 ? lanes<std::uint64_t>(i, operand)[lane]
                                                          : lanes<std::uint32_t>(i, operand)[lane];
  }
  void set_word(const Instruction& i, int operand, int lane, std::uint64_t x) {
    if (i.operands[static_cast<std::size_t>(operand)] == kNone) return;
    if (i.wide[static_cast<std::size_t>(operand)] != 0) {
      lanes<std::uint64_t>(i, operand).set(lane, x);
    } else {
      lanes<std::uint32_t>(i, operand).set(lane, static_cast<std::uint32_t>(x));
    }
  }
};

/// Calls use(lane) for the lanes of a mask.
template <class Use>
inline void each(Mask mask, Use&& use) {
  if (mask == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) use(lane);
  } else {
    for (; mask != 0; mask &= mask - 1) use(std::countr_zero(mask));
  }
}
inline int first_lane(Mask mask) { return std::countr_zero(mask); }

/// An mbarrier. Its 8 bytes of shared memory stay unused.
struct ArrivalBarrier {
  int expected = 0, pending = 0;
  std::int64_t bytes = 0;  ///< announced less those that came
  std::uint32_t phase = 0;
};

/// A barrier of the block (bar.sync).
struct ThreadBarrier {
  int arrived = 0;
  bool any = false, result = false;  ///< bar.red.or
  std::uint32_t phase = 0;
};

struct Block {
  Cluster* cluster = nullptr;
  int index = 0, rank = 0;
  std::vector<std::uint64_t> memory;  ///< shared
  std::uint32_t bytes = 0;
  std::vector<Warp> warps;
  std::map<std::uint32_t, ArrivalBarrier> barriers;
  std::array<ThreadBarrier, 16> thread_barriers;

  std::uint8_t* shared() { return reinterpret_cast<std::uint8_t*>(memory.data()); }
  ArrivalBarrier& barrier(std::uint32_t address);
};

struct Cluster {
  Machine* machine = nullptr;
  std::vector<Block> blocks;
  std::vector<Copy> copies;  ///< that barriers count
  ThreadBarrier barrier;

  /// The block and the offset of an address of shared::cluster: rank + 1 in the highest byte, or 0 for `own`.
  Block& block_of(std::uint32_t address, Block& own);
};
inline constexpr std::uint32_t kOffsetBits = 24;
inline constexpr std::uint32_t kOffsetMask = (1u << kOffsetBits) - 1;

/// Memory that kernels may touch, by address.
class Memory {
 public:
  void add(const void* begin, std::size_t bytes);
  void remove(const void* begin);
  bool holds(std::uint64_t address, std::size_t bytes) const;

 private:
  std::map<std::uint64_t, std::uint64_t> ends_;  // by beginning
  mutable std::uint64_t begin_ = 0, end_ = 0;    // the range that was asked for last
};
Memory& memory();

struct Launch {
  const Program* program = nullptr;
  using Size = std::array<int, 3>;
  Size grid = {1, 1, 1}, block = {1, 1, 1};
  int cluster = 1;  ///< blocks along x
  std::uint32_t shared_bytes = 0;
  std::vector<std::uint64_t> params;

  static int count(const Size& size) { return size[0] * size[1] * size[2]; }
  int blocks() const { return count(grid); }
  int threads() const { return count(block); }
};

/// Executes one launch. Blocks, warps and copies take turns in an order drawn from the seed.
class Machine {
 public:
  Machine(const Launch& launch, int processors, std::uint64_t seed);
  void run();

  const Launch& launch;
  std::uint64_t executed = 0;  ///< instructions of warps; the clock

 private:
  std::unique_ptr<Cluster> start(int first_block);
  void start_warp(Warp& warp);
  bool advance(Warp& warp, int budget);
  bool execute(Warp& warp);
  std::string deadlock(const Cluster& cluster) const;

  int processors_;
  std::mt19937_64 random_;
  std::uint64_t copy_rounds_;  ///< that a copy which a barrier counts takes, on average at most
};

/// Of hints, fences (memory is in order here), and what only brings lanes together.
Outcome run_nothing(Warp& warp, const Instruction& i, Mask lanes);

/// Address of `bytes` bytes of shared memory of the warp's block, or of one of its cluster; throws Fault.
std::uint8_t* shared_bytes(Block& block, std::uint32_t address, std::size_t bytes);
/// Address of global memory, parameters, or shared memory by its generic address; throws Fault.
std::uint8_t* generic_bytes(Warp& warp, std::uint64_t address, std::size_t bytes);
std::uint8_t* global_bytes(std::uint64_t address, std::size_t bytes);

/// Counts arrivals and bytes at a barrier; its phase ends when none is missing.
void arrive(Block& block, std::uint32_t address, int arrivals, std::int64_t announced);
void complete_bytes(Block& block, std::uint32_t address, std::int64_t bytes);

}  // namespace halftone::emulator
