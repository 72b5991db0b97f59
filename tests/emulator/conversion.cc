// cvt, cvta.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/emulator/machine.h"
#include "tests/emulator/statement.h"
#include "tests/emulator/types.h"

namespace halftone::emulator {
namespace {

using Text = std::string_view;

/// Integers by their low bits, whatever the registers have beyond them; to floats to nearest.
template <class D, class S>
Outcome run_between(Warp& w, const Instruction& i, Mask m) {
  const bool same = (i.wide[0] != 0) == (sizeof(D) == 8) && (i.wide[1] != 0) == (sizeof(S) == 8);
  if (!same) {
    each(m, [&](int l) {
      const auto x = static_cast<D>(static_cast<S>(w.word(i, 1, l)));
      w.set_word(i, 0, l, static_cast<std::uint64_t>(x));
    });
    return Outcome::kNext;
  }
  const auto a = w.lanes<S>(i, 1);
  const auto d = w.lanes<D>(i, 0);
  each(m, [&](int l) { d.set(l, static_cast<D>(a[l])); });
  return Outcome::kNext;
}

using Nearest = decltype([](float x) { return std::nearbyint(x); });
using TowardsZero = decltype([](float x) { return std::trunc(x); });
using Up = decltype([](float x) { return std::ceil(x); });
using Down = decltype([](float x) { return std::floor(x); });

using Saturated = decltype([](float x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; });

template <class Round>
Outcome run_whole(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<float>(i, 0), a = w.lanes<float>(i, 1);
  each(m, [&](int l) { d.set(l, Round{}(a[l])); });
  return Outcome::kNext;
}
/// What does not fit becomes the nearest integer that does, NaN 0.
template <class D, class Round>
Outcome run_to_integer(Warp& w, const Instruction& i, Mask m) {
  const auto a = w.lanes<float>(i, 1);
  const auto d = w.lanes<D>(i, 0);
  constexpr double kLow = static_cast<double>(std::numeric_limits<D>::min());
  constexpr double kHigh = static_cast<double>(std::numeric_limits<D>::max());
  each(m, [&](int l) {
    const double x = Round{}(a[l]);
    d.set(l, std::isnan(x) ? D{0}
             : x <= kLow   ? std::numeric_limits<D>::min()
             : x >= kHigh  ? std::numeric_limits<D>::max()
                           : static_cast<D>(x));
  });
  return Outcome::kNext;
}
template <class D>
Run to_integer(const Statement& s) {
  if (s.has("rni")) return run_to_integer<D, Nearest>;
  if (s.has("rpi")) return run_to_integer<D, Up>;
  if (s.has("rmi")) return run_to_integer<D, Down>;
  return run_to_integer<D, TowardsZero>;
}

using F16 = decltype([](float x) { return f16_of(x); });
using Bf16 = decltype([](float x) { return bf16_of(x); });
using E4m3 = decltype([](float x) { return e4m3_of(x); });

template <class Narrow>
Outcome run_narrow(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<std::uint32_t>(i, 0);
  const auto a = w.lanes<float>(i, 1);
  each(m, [&](int l) { d.set(l, Narrow{}(a[l])); });
  return Outcome::kNext;
}
/// The first operand goes to the upper half.
template <class Narrow, int kBits>
Outcome run_narrow_pair(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<std::uint32_t>(i, 0);
  const auto a = w.lanes<float>(i, 1), b = w.lanes<float>(i, 2);
  each(m, [&](int l) { d.set(l, Narrow{}(a[l]) << kBits | Narrow{}(b[l])); });
  return Outcome::kNext;
}
template <bool kBrain>
Outcome run_widen(Warp& w, const Instruction& i, Mask m) {
  const auto a = w.lanes<std::uint32_t>(i, 1);
  const auto d = w.lanes<float>(i, 0);
  each(m, [&](int l) { d.set(l, kBrain ? f32_of_bf16(a[l] & 0xffff) : f32_of_f16(a[l])); });
  return Outcome::kNext;
}
Outcome run_f16x2_of_e4m3x2(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<std::uint32_t>(i, 0), a = w.lanes<std::uint32_t>(i, 1);
  each(m, [&](int l) {
    d.set(l, f16_of(f32_of_e4m3(a[l] >> 8 & 0xff)) << 16 | f16_of(f32_of_e4m3(a[l] & 0xff)));
  });
  return Outcome::kNext;
}

Run handler(const Statement& s, Text d, Text a) {
  const bool whole = s.only({"rni", "rzi", "rpi", "rmi"}, 2) && s.parts.size() == 4;  // rounds to an integer
  if (d == "e4m3x2" ? !s.only({"rn", "satfinite"}, 2)
                    : !whole && !s.only({"rn"}, 2) && s.opcode != "cvt.sat.f32.f32") {
    return nullptr;
  }
  if (d == "f16x2" && a == "f32") return run_narrow_pair<F16, 16>;
  if (d == "bf16x2" && a == "f32") return run_narrow_pair<Bf16, 16>;
  if (d == "e4m3x2" && a == "f32") return run_narrow_pair<E4m3, 8>;
  if (d == "f16x2" && a == "e4m3x2") return run_f16x2_of_e4m3x2;
  if (d == "f16" && a == "f32") return run_narrow<F16>;
  if (d == "bf16" && a == "f32") return run_narrow<Bf16>;
  if (d == "f32" && a == "f16") return run_widen<false>;
  if (d == "f32" && a == "bf16") return run_widen<true>;
  Run found = nullptr;
  if (d == "f32" && a == "f32") {
    if (s.has("rni")) found = run_whole<Nearest>;
    if (s.has("rzi")) found = run_whole<TowardsZero>;
    if (s.has("rpi")) found = run_whole<Up>;
    if (s.has("rmi")) found = run_whole<Down>;
    if (s.has("sat")) found = run_whole<Saturated>;
  } else if (d == "f64" && a == "f32") {
    found = run_between<double, float>;
  } else if (d == "f32" && a == "f64") {
    found = run_between<float, double>;
  } else if (d == "f64" && is_integer(a)) {
    with_integer(a, [&]<class S>() { found = run_between<double, S>; });
  } else if (d == "f32" && is_integer(a)) {
    with_integer(a, [&]<class S>() { found = run_between<float, S>; });
  } else if (is_integer(d) && a == "f32" && whole) {
    with_integer(d, [&]<class D>() { found = to_integer<D>(s); });
  } else if (is_integer(d) && is_integer(a)) {
    with_integer(d, [&]<class D>() { with_integer(a, [&]<class S>() { found = run_between<D, S>; }); });
  }
  return found;
}

/// Generic addresses of shared memory are those of this process; others are the same in every space.
template <bool kToShared>
Outcome run_shared_address(Warp& w, const Instruction& i, Mask m) {
  const auto base = reinterpret_cast<std::uint64_t>(w.block->shared());
  each(m, [&](int l) { w.set_word(i, 0, l, w.word(i, 1, l) + (kToShared ? 0 - base : base)); });
  return Outcome::kNext;
}

}  // namespace

bool decode_conversion(const Statement& s, Operands& o, Instruction& to) {
  if (s.parts[0] == "cvta") {
    if (s.has("shared")) {
      to.run = s.has("to") ? run_shared_address<true> : run_shared_address<false>;
    } else if (s.has("global") || s.has("param")) {
      to.run = run_between<std::uint64_t, std::uint64_t>;
    } else {
      return false;
    }
    o.write(s.operands[0]);
    o.read(s.operands[1], s.type());
    return true;
  }
  if (s.parts[0] != "cvt" || s.parts.size() < 3) return false;
  const Text d = s.parts[s.parts.size() - 2], a = s.parts.back();
  to.run = handler(s, d, a);
  if (to.run == nullptr) return false;
  o.write(s.operands[0]);
  for (std::size_t n = 1; n < s.operands.size(); ++n) o.read(s.operands[n], a);
  return true;
}

}  // namespace halftone::emulator
