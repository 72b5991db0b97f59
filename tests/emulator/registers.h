// Where a kernel's registers lie in the emulator. A kernel has thousands of them, most of which live within
// one run of instructions without branches: these share places, so that a warp's registers stay in cache.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "tests/emulator/program.h"

namespace halftone::emulator {

inline constexpr int kGuardOperand = -1;

class Registers {
 public:
  explicit Registers(Program& program) : program_(program) {}

  int add(int bits);  ///< 1: a predicate
  /// One register for all uses of a preset.
  int preset(Preset::Source source, std::uint64_t value, bool wide);
  /// Operand `operand` of an instruction is this register; `whole`: written by all lanes that execute it.
  void use(int id, std::uint32_t instruction, int operand, bool whole);
  /// Gives every register its place. `leaders`: first instructions of blocks, in any order.
  void place(std::vector<std::uint32_t> leaders);

 private:
  struct Use {
    std::uint32_t instruction;
    int operand;
    bool whole;
  };
  struct Register {
    int bits = 32;
    bool fixed = false;  ///< a preset
    std::uint32_t place = 0;
    std::vector<Use> uses;
  };
  bool local(const Register& r, const std::vector<std::uint32_t>& leaders) const;

  Program& program_;
  std::vector<Register> registers_;
  std::map<std::tuple<int, std::uint64_t, bool>, int> presets_;
  std::vector<std::pair<int, Preset>> preset_of_;
};

}  // namespace halftone::emulator
