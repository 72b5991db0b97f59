// A kernel of a PTX file, decoded: what the emulator executes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace halftone::emulator {

struct Warp;
struct Instruction;

inline constexpr int kLanes = 32;
using Mask = std::uint32_t;  ///< of a warp's lanes
inline constexpr Mask kAllLanes = ~Mask{0};

enum class Outcome : std::uint8_t {
  kNext,  ///< go on behind the instruction
  kWait,  ///< nothing was done: try again when others have run
};
using Run = Outcome (*)(Warp&, const Instruction&, Mask);

enum class Kind : std::uint8_t { kOther, kBranch, kExit };

struct Instruction {
  Run run = nullptr;
  Kind kind = Kind::kOther;
  bool guarded = false, inverted = false;  ///< by the predicate at `guard`
  bool together = false;                   ///< .sync: all lanes that it names execute it at once
  std::int32_t member_mask = -1;           ///< operand that names them; -1: all lanes of the warp
  std::uint32_t guard = 0;                 ///< place of a register, in bytes
  std::uint32_t target = 0;                ///< instruction that a branch goes to
  std::int64_t immediate = 0;              ///< offset of an address, or what the instruction says it is
  std::vector<std::uint32_t> operands;     ///< places of registers, in bytes; kNone: "_"
  std::vector<std::uint8_t> wide;          ///< of each operand, whether its register has 64 bits
  std::uint32_t line = 0;                  ///< in the file
  std::string_view text;
};
inline constexpr std::uint32_t kNone = ~0u;

/// A register that holds the same for all instructions: a constant, an address, a special register.
struct Preset {
  enum Source : std::uint8_t { kConstant, kParams, kThread, kThreads, kBlock, kBlocks, kRank, kLane };
  Source source = kConstant;
  bool wide = false;
  std::uint32_t place = 0;
  std::uint64_t value = 0;  ///< the constant, an offset, or 0, 1, 2: of x, y, z
};

struct Program {
  std::string name, path;
  std::string text;
  std::vector<Instruction> code;
  std::vector<Preset> presets;
  std::uint32_t register_bytes = 0;  ///< of a warp
  struct Param {
    std::uint32_t offset, bytes;
  };
  std::vector<Param> params;
  std::unordered_map<std::string, std::uint32_t>
      dynamic_shared;               ///< alignment of arrays that the launch sizes
  std::uint32_t static_shared = 0;  ///< bytes of shared memory beside what the launch asks for
};

/// The kernels of all PTX files in a folder and those below it, decoded when first asked for.
class Library {
 public:
  explicit Library(const std::string& folder);
  const Program& kernel(const std::string& name);

 private:
  struct Place {
    std::string path;
    std::size_t begin, end;
  };
  std::unordered_map<std::string, Place> places_;
  std::unordered_map<std::string, std::unique_ptr<Program>> programs_;
};

}  // namespace halftone::emulator
