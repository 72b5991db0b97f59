// Statements of PTX and their operands: what the decoders of instructions see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tests/emulator/program.h"

namespace halftone::emulator {

/// Operands of a statement; asking for one that it lacks throws.
struct OperandTexts : std::vector<std::string_view> {
  std::string_view operator[](std::size_t n) const { return at(n); }
};

/// "[@guard] opcode operands;" cut up. Vectors {a, b} are flattened.
struct Statement {
  std::string_view text;
  std::string_view opcode;
  std::vector<std::string_view> parts;  ///< of the opcode, between dots
  OperandTexts operands;

  bool has(std::string_view part) const {
    for (const std::string_view p : parts) {
      if (p == part) return true;
    }
    return false;
  }
  std::string_view type() const { return parts.back(); }
  /// Whether all that stands between the name and the last `types` parts is one of these: what a handler does
  /// not know it must not ignore.
  bool only(std::initializer_list<std::string_view> known, std::size_t types = 1) const {
    for (std::size_t n = 1; n + types < parts.size(); ++n) {
      if (std::find(known.begin(), known.end(), parts[n]) == known.end()) return false;
    }
    return true;
  }
};

/// Gives the operands of one instruction their registers.
class Operands {
 public:
  virtual ~Operands() = default;
  virtual void write(std::string_view name) = 0;   ///< a register that the instruction writes
  virtual void update(std::string_view name) = 0;  ///< one that it reads and writes
  virtual void read(std::string_view name, std::string_view type) = 0;  ///< a register or a constant
  /// "[register + offset]" or "[symbol + offset]": the register is an operand, the offset the immediate.
  virtual void address(std::string_view text) = 0;
  virtual std::int64_t integer(std::string_view text) const = 0;  ///< a constant that the code depends on
};

/// Each sets run (and more) of `to` and names its operands; false if the instruction is none of its own.
bool decode_arithmetic(const Statement& s, Operands& operands, Instruction& to);
bool decode_floats(const Statement& s, Operands& operands, Instruction& to);
bool decode_conversion(const Statement& s, Operands& operands, Instruction& to);
bool decode_memory(const Statement& s, Operands& operands, Instruction& to);
bool decode_warp(const Statement& s, Operands& operands, Instruction& to);
bool decode_matrix(const Statement& s, Operands& operands, Instruction& to);
bool decode_wgmma(const Statement& s, Operands& operands, Instruction& to);
bool decode_copy(const Statement& s, Operands& operands, Instruction& to);

}  // namespace halftone::emulator
