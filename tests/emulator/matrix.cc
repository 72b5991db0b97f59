// Products of a warp and the moves of 8 x 8 matrices. Fragments: PTX ISA, "Matrix multiply-accumulate
// operation using mma".
#include <array>
#include <cstring>

#include "tests/emulator/machine.h"
#include "tests/emulator/statement.h"
#include "tests/emulator/types.h"

namespace halftone::emulator {
namespace {

struct F16 {
  using Sum = float;
  static constexpr int kBits = 16;
  static float widen(std::uint32_t x) { return f32_of_f16(x); }
};
struct Bf16 {
  using Sum = float;
  static constexpr int kBits = 16;
  static float widen(std::uint32_t x) { return f32_of_bf16(x); }
};
struct E4m3 {
  using Sum = float;
  static constexpr int kBits = 8;
  static float widen(std::uint32_t x) { return f32_of_e4m3(x); }
};
struct S8 {
  using Sum = std::int32_t;
  static constexpr int kBits = 8;
  static std::int32_t widen(std::uint32_t x) { return static_cast<std::int8_t>(x); }
};

/// Element `n` of a register.
template <class Type>
typename Type::Sum element(std::uint32_t word, int n) {
  return Type::widen(word >> Type::kBits * n & ((1u << Type::kBits) - 1));
}

/// d (4) = a (kK registers of a 16 x k matrix, kK = 2 or 4) b (kK / 2) + c (4).
template <class Type, int kA>
Outcome run_mma(Warp& w, const Instruction& i, Mask) {
  using Sum = typename Type::Sum;
  constexpr int kPer = 32 / Type::kBits, kB = kA / 2, kDepth = 4 * kPer * kB;
  Sum a[16][kDepth], b[kDepth][8], d[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane / 4, column = lane % 4 * kPer;
    for (int n = 0; n < kPer; ++n) {
      for (int r = 0; r < kA; ++r) {
        a[row + r % 2 * 8][column + r / 2 * 4 * kPer + n] =
            element<Type>(w.lanes<std::uint32_t>(i, 4 + r)[lane], n);
      }
      for (int r = 0; r < kB; ++r) {
        b[column + r * 4 * kPer + n][row] = element<Type>(w.lanes<std::uint32_t>(i, 4 + kA + r)[lane], n);
      }
    }
    for (int r = 0; r < 4; ++r)
      d[row + r / 2 * 8][lane % 4 * 2 + r % 2] = w.lanes<Sum>(i, 4 + kA + kB + r)[lane];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int r = 0; r < 4; ++r) w.lanes<Sum>(i, r).set(lane, d[lane / 4 + r / 2 * 8][lane % 4 * 2 + r % 2]);
  }
  return Outcome::kNext;
}

bool decode_mma(const Statement& s, Operands& o, Instruction& to) {
  if (!s.has("row") || !s.has("col")) return false;
  if (s.has("m16n8k16")) {
    to.run = s.has("bf16") ? run_mma<Bf16, 4> : run_mma<F16, 4>;
  } else if (s.has("m16n8k8")) {
    to.run = s.has("bf16") ? run_mma<Bf16, 2> : run_mma<F16, 2>;
  } else if (s.has("m16n8k32")) {
    to.run = s.has("s8") ? run_mma<S8, 4> : s.has("e4m3") ? run_mma<E4m3, 4> : nullptr;
  }
  for (std::size_t n = 0; n < s.operands.size(); ++n)
    n < 4 ? o.write(s.operands[n]) : o.read(s.operands[n], "b32");
  return to.run != nullptr;
}

/// The four or fewer matrices of 8 x 8 halves that a warp loads or stores: lane 8 n + r has the address of
/// row r of matrix n.
template <bool kLoads, bool kTransposed, int kCount>
Outcome run_matrices(Warp& w, const Instruction& i, Mask) {
  constexpr int kAddress = kLoads ? kCount : 0, kFirst = kLoads ? 0 : 1;
  for (int n = 0; n < kCount; ++n) {
    std::array<std::array<std::uint16_t, 8>, 8> matrix;
    const auto x = w.lanes<std::uint32_t>(i, kFirst + n);
    const auto place = [&](int row) {
      const auto address = static_cast<std::uint32_t>(w.word(i, kAddress, 8 * n + row) +
                                                      static_cast<std::uint64_t>(i.immediate));
      if (address % 16 != 0) throw Fault("a row of a matrix is not 16-byte aligned");
      return shared_bytes(*w.block, address, 16);
    };
    const auto half = [&](int lane, int upper) -> std::uint16_t& {
      const int row = lane / 4, column = lane % 4 * 2 + upper;
      return kTransposed ? matrix[static_cast<std::size_t>(column)][static_cast<std::size_t>(row)]
                         : matrix[static_cast<std::size_t>(row)][static_cast<std::size_t>(column)];
    };
    if constexpr (kLoads) {
      for (int row = 0; row < 8; ++row)
        std::memcpy(matrix[static_cast<std::size_t>(row)].data(), place(row), 16);
      for (int lane = 0; lane < kLanes; ++lane) {
        x.set(lane, static_cast<std::uint32_t>(half(lane, 1)) << 16 | half(lane, 0));
      }
    } else {
      for (int lane = 0; lane < kLanes; ++lane) {
        half(lane, 0) = static_cast<std::uint16_t>(x[lane]);
        half(lane, 1) = static_cast<std::uint16_t>(x[lane] >> 16);
      }
      for (int row = 0; row < 8; ++row)
        std::memcpy(place(row), matrix[static_cast<std::size_t>(row)].data(), 16);
    }
  }
  return Outcome::kNext;
}

template <bool kLoads>
bool decode_matrices(const Statement& s, Operands& o, Instruction& to) {
  const bool transposed = s.has("trans");
  const std::size_t count = s.has("x4") ? 4 : s.has("x2") ? 2 : 1;
  const auto pick = [&]<int kCount>() -> Run {
    return transposed ? run_matrices<kLoads, true, kCount> : run_matrices<kLoads, false, kCount>;
  };
  to.run = count == 4   ? pick.template operator()<4>()
           : count == 2 ? pick.template operator()<2>()
                        : pick.template operator()<1>();
  if (kLoads) {
    for (std::size_t n = 0; n < count; ++n) o.write(s.operands[n]);
    o.address(s.operands[count]);
  } else {
    o.address(s.operands[0]);
    for (std::size_t n = 1; n <= count; ++n) o.read(s.operands[n], "b32");
  }
  return true;
}

Outcome run_transposition(Warp& w, const Instruction& i, Mask) {
  const auto d = w.lanes<std::uint32_t>(i, 0), a = w.lanes<std::uint32_t>(i, 1);
  std::array<std::uint32_t, kLanes> x;
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto half = [&](int upper) {  // row and column exchanged
      const int row = lane % 4 * 2 + upper, column = lane / 4;
      return a[row * 4 + column / 2] >> 16 * (column % 2) & 0xffff;
    };
    x[static_cast<std::size_t>(lane)] = half(1) << 16 | half(0);
  }
  for (int lane = 0; lane < kLanes; ++lane) d.set(lane, x[static_cast<std::size_t>(lane)]);
  return Outcome::kNext;
}

}  // namespace

bool decode_matrix(const Statement& s, Operands& o, Instruction& to) {
  const std::string_view name = s.parts[0];
  to.together = name == "mma" || name == "ldmatrix" || name == "stmatrix" || name == "movmatrix";
  if (name == "mma") return decode_mma(s, o, to);
  if (name == "ldmatrix") return decode_matrices<true>(s, o, to);
  if (name == "stmatrix") return decode_matrices<false>(s, o, to);
  if (name == "movmatrix" && s.has("trans")) {
    o.write(s.operands[0]);
    o.read(s.operands[1], "b32");
    to.run = run_transposition;
    return true;
  }
  return false;
}

}  // namespace halftone::emulator
