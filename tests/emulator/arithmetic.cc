// Integers, comparisons, moves and selections.
#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>

#include "tests/emulator/machine.h"
#include "tests/emulator/statement.h"
#include "tests/emulator/types.h"

namespace halftone::emulator {
namespace {

using Text = std::string_view;

template <class T>
using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
template <class T>
using Bits = std::make_unsigned_t<T>;

template <class T, class Op>
Outcome run_unary(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<T>(i, 0), a = w.lanes<T>(i, 1);
  each(m, [&](int l) { d.set(l, Op{}(a[l])); });
  return Outcome::kNext;
}
template <class T, class Op>
Outcome run_binary(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<T>(i, 0), a = w.lanes<T>(i, 1), b = w.lanes<T>(i, 2);
  each(m, [&](int l) { d.set(l, Op{}(a[l], b[l])); });
  return Outcome::kNext;
}
/// b counts bits: always of 32 bits.
template <class T, class Op>
Outcome run_shift(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<T>(i, 0), a = w.lanes<T>(i, 1);
  const auto b = w.lanes<std::uint32_t>(i, 2);
  each(m, [&](int l) { d.set(l, Op{}(a[l], b[l])); });
  return Outcome::kNext;
}
template <class T, class Op>
Outcome run_ternary(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<T>(i, 0), a = w.lanes<T>(i, 1), b = w.lanes<T>(i, 2), c = w.lanes<T>(i, 3);
  each(m, [&](int l) { d.set(l, Op{}(a[l], b[l], c[l])); });
  return Outcome::kNext;
}

// Sums of what overflows wrap.
template <class T>
struct Add {
  T operator()(T a, T b) const { return static_cast<T>(static_cast<Bits<T>>(a) + static_cast<Bits<T>>(b)); }
};
template <class T>
struct Sub {
  T operator()(T a, T b) const { return static_cast<T>(static_cast<Bits<T>>(a) - static_cast<Bits<T>>(b)); }
};
template <class T>
struct MulLow {
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
};
template <class T>
struct MulHigh {
  T operator()(T a, T b) const { return static_cast<T>(Wide<T>(a) * Wide<T>(b) >> 8 * sizeof(T)); }
};
template <class T>
struct MadLow {
  T operator()(T a, T b, T c) const { return Add<T>{}(MulLow<T>{}(a, b), c); }
};
template <class T>
struct Div {
  T operator()(T a, T b) const {
    if (b == 0) return static_cast<T>(-1);
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return Sub<T>{}(0, a);
    }
    return static_cast<T>(a / b);
  }
};
template <class T>
struct Rem {
  T operator()(T a, T b) const { return Sub<T>{}(a, MulLow<T>{}(Div<T>{}(a, b), b)); }
};
template <class T>
struct Min {
  T operator()(T a, T b) const { return std::min(a, b); }
};
template <class T>
struct Max {
  T operator()(T a, T b) const { return std::max(a, b); }
};
template <class T>
struct Neg {
  T operator()(T a) const { return Sub<T>{}(0, a); }
};
template <class T>
struct Abs {
  T operator()(T a) const { return a < 0 ? Sub<T>{}(0, a) : a; }
};
template <class T>
struct And {
  T operator()(T a, T b) const { return static_cast<T>(a & b); }
};
template <class T>
struct Or {
  T operator()(T a, T b) const { return static_cast<T>(a | b); }
};
template <class T>
struct Xor {
  T operator()(T a, T b) const { return static_cast<T>(a ^ b); }
};
template <class T>
struct Not {
  T operator()(T a) const { return static_cast<T>(~a); }
};
template <class T>
struct Copy1 {
  T operator()(T a) const { return a; }
};
template <class T>
struct ShiftLeft {
  T operator()(T a, std::uint32_t n) const {
    return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<Bits<T>>(a) << n);
  }
};
template <class T>
struct ShiftRight {
  T operator()(T a, std::uint32_t n) const {
    if (n >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T{0};
    return static_cast<T>(a >> n);
  }
};
struct PopulationCount {
  std::uint32_t operator()(std::uint32_t a) const { return static_cast<std::uint32_t>(std::popcount(a)); }
};
struct Brev {
  std::uint32_t operator()(std::uint32_t a) const {
    std::uint32_t x = 0;
    for (int bit = 0; bit < 32; ++bit) x |= (a >> bit & 1) << (31 - bit);
    return x;
  }
};
/// Bytes of {b, a} by the digits of c; a digit's bit 3 repeats the byte's sign.
struct Prmt {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t c) const {
    const std::uint64_t both = std::uint64_t{b} << 32 | a;
    std::uint32_t x = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const std::uint32_t digit = c >> 4 * byte & 15;
      auto value = static_cast<std::uint32_t>(both >> 8 * (digit & 7)) & 0xff;
      if ((digit & 8) != 0) value = (value & 0x80) != 0 ? 0xff : 0;
      x |= value << 8 * byte;
    }
    return x;
  }
};
struct FunnelLeft {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{b} << 32 | a) << (n & 31) >> 32);
  }
};
struct FunnelRight {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{b} << 32 | a) >> (n & 31));
  }
};

/// A product of twice the bits of its factors.
template <class T, class D>
Outcome run_mul_wide(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<D>(i, 0);
  const auto a = w.lanes<T>(i, 1), b = w.lanes<T>(i, 2);
  const bool add = i.operands.size() == 4;
  each(m, [&](int l) {
    const D product = static_cast<D>(a[l]) * static_cast<D>(b[l]);
    d.set(l, add ? static_cast<D>(product + w.lanes<D>(i, 3)[l]) : product);
  });
  return Outcome::kNext;
}

/// The larger of each pair of halves.
Outcome run_max_pairs(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<std::uint32_t>(i, 0), a = w.lanes<std::uint32_t>(i, 1),
             b = w.lanes<std::uint32_t>(i, 2);
  each(m, [&](int l) {
    d.set(l, std::max(a[l] & 0xffffu, b[l] & 0xffffu) | std::max(a[l] >> 16, b[l] >> 16) << 16);
  });
  return Outcome::kNext;
}

/// d = b with the low bits of a inserted: [c, c + d) of them.
template <class T>
Outcome run_bfi(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<T>(i, 0), a = w.lanes<T>(i, 1), b = w.lanes<T>(i, 2);
  const auto at = w.lanes<std::uint32_t>(i, 3), count = w.lanes<std::uint32_t>(i, 4);
  each(m, [&](int l) {
    const std::uint32_t from = at[l] & 0xff, bits = count[l] & 0xff;
    const T which = ShiftLeft<T>{}(static_cast<T>(~ShiftLeft<T>{}(static_cast<T>(~T{0}), bits)), from);
    d.set(l, static_cast<T>((ShiftLeft<T>{}(a[l], from) & which) | (b[l] & ~which)));
  });
  return Outcome::kNext;
}

/// How far the highest bit would have to move to the left.
Outcome run_bfind_shift(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<std::uint32_t>(i, 0), a = w.lanes<std::uint32_t>(i, 1);
  each(m, [&](int l) { d.set(l, a[l] == 0 ? ~0u : static_cast<std::uint32_t>(std::countl_zero(a[l]))); });
  return Outcome::kNext;
}

// --- Predicates ---

template <class T, class Op>
Outcome run_setp(Warp& w, const Instruction& i, Mask m) {
  const auto a = w.lanes<T>(i, 1), b = w.lanes<T>(i, 2);
  Mask found = 0;
  for (int l = 0; l < kLanes; ++l) found |= static_cast<Mask>(Op{}(a[l], b[l])) << l;
  w.set_predicate(i, 0, m, found);
  return Outcome::kNext;
}
template <class T, template <class> class Op>
struct OrUnordered {
  bool operator()(T a, T b) const { return std::isnan(a) || std::isnan(b) || Op<T>{}(a, b); }
};

template <class T>
Run comparison(Text how) {
  if (how == "eq") return run_setp<T, std::equal_to<T>>;
  if (how == "lt" || how == "lo") return run_setp<T, std::less<T>>;
  if (how == "le" || how == "ls") return run_setp<T, std::less_equal<T>>;
  if (how == "gt" || how == "hi") return run_setp<T, std::greater<T>>;
  if (how == "ge" || how == "hs") return run_setp<T, std::greater_equal<T>>;
  if constexpr (std::is_floating_point_v<T>) {
    if (how == "ne") return run_setp<T, decltype([](T a, T b) { return a < b || a > b; })>;
    if (how == "equ") return run_setp<T, OrUnordered<T, std::equal_to>>;
    if (how == "neu") return run_setp<T, OrUnordered<T, std::not_equal_to>>;
    if (how == "ltu") return run_setp<T, OrUnordered<T, std::less>>;
    if (how == "leu") return run_setp<T, OrUnordered<T, std::less_equal>>;
    if (how == "gtu") return run_setp<T, OrUnordered<T, std::greater>>;
    if (how == "geu") return run_setp<T, OrUnordered<T, std::greater_equal>>;
    if (how == "num") return run_setp<T, decltype([](T a, T b) { return !std::isnan(a) && !std::isnan(b); })>;
    if (how == "nan") return run_setp<T, decltype([](T a, T b) { return std::isnan(a) || std::isnan(b); })>;
  } else if (how == "ne") {
    return run_setp<T, std::not_equal_to<T>>;
  }
  return nullptr;
}

template <class Op>
Outcome run_predicates(Warp& w, const Instruction& i, Mask m) {
  const Mask a = w.predicate(i, 1), b = i.operands.size() > 2 ? w.predicate(i, 2) : 0;
  w.set_predicate(i, 0, m, Op{}(a, b));
  return Outcome::kNext;
}
Outcome run_constant_predicate(Warp& w, const Instruction& i, Mask m) {
  w.set_predicate(i, 0, m, i.immediate != 0 ? m : 0);
  return Outcome::kNext;
}
template <class T>
Outcome run_selp(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<T>(i, 0), a = w.lanes<T>(i, 1), b = w.lanes<T>(i, 2);
  const Mask which = w.predicate(i, 3);
  each(m, [&](int l) { d.set(l, (which >> l & 1) != 0 ? a[l] : b[l]); });
  return Outcome::kNext;
}

bool decode_predicates(const Statement& s, Operands& o, Instruction& to) {
  if (s.type() != "pred") return false;
  const Text name = s.parts[0];
  o.write(s.operands[0]);
  if (name == "mov" && s.operands[1].front() != '%') {
    to.immediate = o.integer(s.operands[1]);
    to.run = run_constant_predicate;
    return true;
  }
  for (std::size_t n = 1; n < s.operands.size(); ++n) o.read(s.operands[n], "pred");
  to.run = name == "and"   ? run_predicates<std::bit_and<Mask>>
           : name == "or"  ? run_predicates<std::bit_or<Mask>>
           : name == "xor" ? run_predicates<std::bit_xor<Mask>>
           : name == "not" ? run_predicates<decltype([](Mask a, Mask) { return ~a; })>
           : name == "mov" ? run_predicates<decltype([](Mask a, Mask) { return a; })>
                           : nullptr;
  return to.run != nullptr;
}

// --- Moves between registers and vectors of them ---

/// 64 bits of two, or 32 bits of two halves.
Outcome run_pack(Warp& w, const Instruction& i, Mask m) {
  const int bits = i.wide[0] != 0 ? 32 : 16;
  each(m, [&](int l) {
    w.set_word(i, 0, l, w.word(i, 2, l) << bits | (w.word(i, 1, l) & ((std::uint64_t{1} << bits) - 1)));
  });
  return Outcome::kNext;
}
Outcome run_unpack(Warp& w, const Instruction& i, Mask m) {
  const int bits = i.wide[2] != 0 ? 32 : 16;
  each(m, [&](int l) {
    const std::uint64_t x = w.word(i, 2, l);
    w.set_word(i, 0, l, x & ((std::uint64_t{1} << bits) - 1));
    w.set_word(i, 1, l, x >> bits);
  });
  return Outcome::kNext;
}
Outcome run_clock(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int l) { w.set_word(i, 0, l, w.block->cluster->machine->executed); });
  return Outcome::kNext;
}

bool decode_move(const Statement& s, Operands& o, Instruction& to) {
  if (s.operands.size() > 3 || s.parts.size() != 2) return false;
  const bool packs = s.operands.size() == 3;
  const bool unpacks = packs && s.text.find('{') < s.text.find(',');
  const Text half = s.type().ends_with("64") ? "b32" : "b16";
  if (s.operands.back().starts_with("%clock")) {
    o.write(s.operands[0]);
    to.run = run_clock;
  } else if (unpacks) {
    o.write(s.operands[0]);
    o.write(s.operands[1]);
    o.read(s.operands[2], s.type());
    to.run = run_unpack;
  } else if (packs) {
    o.write(s.operands[0]);
    o.read(s.operands[1], half);
    o.read(s.operands[2], half);
    to.run = run_pack;
  } else {
    o.write(s.operands[0]);
    o.read(s.operands[1], s.type());
    to.run = s.type().ends_with("64") ? run_unary<std::uint64_t, Copy1<std::uint64_t>>
                                      : run_unary<std::uint32_t, Copy1<std::uint32_t>>;
  }
  return true;
}

/// Handlers of the integer instruction called `name`.
template <class T>
Run integer_handler(Text name, const Statement& s) {
  if (name == "add") return run_binary<T, Add<T>>;
  if (name == "sub") return run_binary<T, Sub<T>>;
  if (name == "mul" && s.has("lo")) return run_binary<T, MulLow<T>>;
  if (name == "mul" && s.has("hi")) return run_binary<T, MulHigh<T>>;
  if (name == "mad" && s.has("lo")) return run_ternary<T, MadLow<T>>;
  if (name == "div") return run_binary<T, Div<T>>;
  if (name == "rem") return run_binary<T, Rem<T>>;
  if (name == "min") return run_binary<T, Min<T>>;
  if (name == "max") return run_binary<T, Max<T>>;
  if (name == "neg") return run_unary<T, Neg<T>>;
  if (name == "abs") return run_unary<T, Abs<T>>;
  if (name == "and") return run_binary<T, And<T>>;
  if (name == "or") return run_binary<T, Or<T>>;
  if (name == "xor") return run_binary<T, Xor<T>>;
  if (name == "not") return run_unary<T, Not<T>>;
  if (name == "shl") return run_shift<T, ShiftLeft<T>>;
  if (name == "shr") return run_shift<T, ShiftRight<T>>;
  if (name == "selp") return run_selp<T>;
  if constexpr (sizeof(T) >= 4 && std::is_unsigned_v<T>) {
    if (name == "bfi") return run_bfi<T>;
  }
  if constexpr (sizeof(T) == 4 && std::is_unsigned_v<T>) {
    if (name == "prmt") return run_ternary<T, Prmt>;
    if (name == "shf") return s.has("l") ? run_ternary<T, FunnelLeft> : run_ternary<T, FunnelRight>;
    if (name == "popc") return run_unary<T, PopulationCount>;
    if (name == "brev") return run_unary<T, Brev>;
    if (name == "bfind" && s.has("shiftamt")) return run_bfind_shift;
  }
  return nullptr;
}

}  // namespace

bool decode_arithmetic(const Statement& s, Operands& o, Instruction& to) {
  const Text name = s.parts[0];
  if (name == "setp") {
    if (s.type() == "f32") {
      to.run = comparison<float>(s.parts[1]);
    } else if (s.type() == "f64") {
      to.run = comparison<double>(s.parts[1]);
    } else {
      with_integer(s.type(), [&]<class T>() { to.run = comparison<T>(s.parts[1]); });
    }
    if (to.run == nullptr || s.parts.size() != 3) return false;
    o.write(s.operands[0]);
    o.read(s.operands[1], s.type());
    o.read(s.operands[2], s.type());
    return true;
  }
  if (s.parts.back() == "pred" && s.parts.size() == 2) return decode_predicates(s, o, to);
  if (name == "mov") return decode_move(s, o, to);
  if (name == "selp") {
    to.run = s.type().ends_with("64") ? run_selp<std::uint64_t> : run_selp<std::uint32_t>;
    o.write(s.operands[0]);
    o.read(s.operands[1], s.type());
    o.read(s.operands[2], s.type());
    o.read(s.operands[3], "pred");
    return true;
  }
  if (s.opcode == "max.u16x2") {
    o.write(s.operands[0]);
    o.read(s.operands[1], "b32");
    o.read(s.operands[2], "b32");
    to.run = run_max_pairs;
    return true;
  }
  if (!is_integer(s.type()) || !s.only({"lo", "hi", "wide", "l", "r", "wrap", "shiftamt"})) return false;
  if ((name == "mul" || name == "mad") && s.has("wide")) {
    to.run = s.type() == "u16"   ? run_mul_wide<std::uint16_t, std::uint32_t>
             : s.type() == "s16" ? run_mul_wide<std::int16_t, std::int32_t>
             : s.type() == "u32" ? run_mul_wide<std::uint32_t, std::uint64_t>
                                 : run_mul_wide<std::int32_t, std::int64_t>;
    o.write(s.operands[0]);
    o.read(s.operands[1], s.type());
    o.read(s.operands[2], s.type());
    if (s.operands.size() == 4) o.read(s.operands[3], s.type().ends_with("32") ? "b64" : "b32");
    return true;
  }
  with_integer(s.type(), [&]<class T>() { to.run = integer_handler<T>(name, s); });
  if (to.run == nullptr) return false;
  // What counts bits has 32 of them.
  const std::size_t counts = name == "shl" || name == "shr" ? 2 : name == "bfi" ? 3 : s.operands.size();
  o.write(s.operands[0]);
  for (std::size_t n = 1; n < s.operands.size(); ++n) o.read(s.operands[n], n >= counts ? "b32" : s.type());
  return true;
}

}  // namespace halftone::emulator
