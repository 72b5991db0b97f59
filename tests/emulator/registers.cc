#include "tests/emulator/registers.h"

#include <algorithm>

namespace halftone::emulator {

int Registers::add(int bits) {
  registers_.emplace_back();
  registers_.back().bits = bits;
  return static_cast<int>(registers_.size()) - 1;
}

int Registers::preset(Preset::Source source, std::uint64_t value, bool wide) {
  const auto [at, added] = presets_.try_emplace({source, value, wide}, 0);
  if (added) {
    at->second = add(wide ? 64 : 32);
    registers_.back().fixed = true;
    preset_of_.emplace_back(at->second, Preset{source, wide, 0, value});
  }
  return at->second;
}

void Registers::use(int id, std::uint32_t instruction, int operand, bool whole) {
  registers_[static_cast<std::size_t>(id)].uses.push_back({instruction, operand, whole});
}

bool Registers::local(const Register& r, const std::vector<std::uint32_t>& leaders) const {
  if (r.fixed || r.uses.empty() || !r.uses.front().whole) return false;
  // An instruction that reads what it writes has the writing operand first.
  for (const Use& u : r.uses) {
    if (u.instruction == r.uses.front().instruction && !u.whole) return false;
  }
  const auto next = std::ranges::upper_bound(leaders, r.uses.front().instruction);
  return next == leaders.end() || r.uses.back().instruction < *next;
}

void Registers::place(std::vector<std::uint32_t> leaders) {
  std::ranges::sort(leaders);
  std::uint32_t bytes = 0;
  const auto bytes_of = [](const Register& r) {
    return static_cast<std::uint32_t>(kLanes) * (r.bits == 64 ? 8 : 4);
  };
  std::vector<std::vector<int>> begins(program_.code.size()), ends(program_.code.size());
  for (std::size_t id = 0; id < registers_.size(); ++id) {
    Register& r = registers_[id];
    if (local(r, leaders)) {
      begins[r.uses.front().instruction].push_back(static_cast<int>(id));
      ends[r.uses.back().instruction].push_back(static_cast<int>(id));
    } else if (!r.uses.empty()) {
      r.place = bytes;
      bytes += bytes_of(r);
    }
  }
  // A place is free again behind the last instruction that names its register, never within it: handlers
  // write a lane's result before they read the next lane's operands. Lanes that run apart may be in different
  // blocks, so predicates, which are one word for all lanes, share no places with other registers.
  std::map<int, std::vector<std::uint32_t>> free;
  for (std::size_t i = 0; i < program_.code.size(); ++i) {
    for (const int id : begins[i]) {
      Register& r = registers_[static_cast<std::size_t>(id)];
      std::vector<std::uint32_t>& places = free[r.bits];
      if (places.empty()) {
        places.push_back(bytes);
        bytes += bytes_of(r);
      }
      r.place = places.back();
      places.pop_back();
    }
    for (const int id : ends[i]) {
      const Register& r = registers_[static_cast<std::size_t>(id)];
      free[r.bits].push_back(r.place);
    }
  }
  program_.register_bytes = bytes;
  for (const Register& r : registers_) {
    for (const Use& u : r.uses) {
      Instruction& i = program_.code[u.instruction];
      (u.operand == kGuardOperand ? i.guard : i.operands[static_cast<std::size_t>(u.operand)]) = r.place;
    }
  }
  for (auto& [id, preset] : preset_of_) {
    preset.place = registers_[static_cast<std::size_t>(id)].place;
    program_.presets.push_back(preset);
  }
}

}  // namespace halftone::emulator
