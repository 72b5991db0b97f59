// Arithmetic of fp32 and of pairs of 16-bit floats.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "tests/emulator/machine.h"
#include "tests/emulator/statement.h"
#include "tests/emulator/types.h"

namespace halftone::emulator {
namespace {

using Text = std::string_view;

template <class T, int kCount, class Op>
Outcome run_float(Warp& w, const Instruction& i, Mask m) {
  const auto d = w.lanes<T>(i, 0), a = w.lanes<T>(i, 1);
  const auto b = w.lanes<T>(i, kCount > 1 ? 2 : 1), c = w.lanes<T>(i, kCount > 2 ? 3 : 1);
  each(m, [&](int l) {
    if constexpr (kCount == 1) {
      d.set(l, Op{}(a[l]));
    } else if constexpr (kCount == 2) {
      d.set(l, Op{}(a[l], b[l]));
    } else {
      d.set(l, Op{}(a[l], b[l], c[l]));
    }
  });
  return Outcome::kNext;
}

/// .ftz: a subnormal counts as zero of its sign.
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// A number and NaN give the number; .NaN gives NaN. Of zeros the sign counts.
using Min = decltype([]<class T>(T a, T b) { return a == b ? (std::signbit(a) ? a : b) : std::fmin(a, b); });
using Max = decltype([]<class T>(T a, T b) { return a == b ? (std::signbit(a) ? b : a) : std::fmax(a, b); });
using MaxOrNan = decltype([]<class T>(T a, T b) {
  return std::isnan(a) || std::isnan(b) ? a + b : Max{}(a, b);
});
/// .sat: within [0, 1], NaN 0.
using MulSaturated = decltype([]<class T>(T a, T b) { return a * b > 0 ? std::fmin(a * b, T{1}) : T{0}; });
using Add = decltype([]<class T>(T a, T b) { return a + b; });
using Sub = decltype([]<class T>(T a, T b) { return a - b; });
using Mul = decltype([]<class T>(T a, T b) { return a * b; });
using Div = decltype([]<class T>(T a, T b) { return a / b; });
using Fma = decltype([]<class T>(T a, T b, T c) { return std::fma(a, b, c); });
/// .rm: towards minus infinity. The product is exact in fp64, and what the sum loses there is known.
using FmaDown = decltype([](float a, float b, float c) {
  const double product = static_cast<double>(a) * b, sum = product + c, added = sum - product;
  const double lost = (product - (sum - added)) + (c - added);
  const auto x = static_cast<float>(sum);
  return x > sum || (x == sum && lost < 0) ? std::nextafter(x, -std::numeric_limits<float>::infinity()) : x;
});
using Neg = decltype([]<class T>(T a) { return -a; });
using Abs = decltype([]<class T>(T a) { return std::fabs(a); });
using CopySign = decltype([]<class T>(T sign, T a) { return std::copysign(a, sign); });
using Rcp = decltype([]<class T>(T a) { return 1 / a; });
using RcpFlushed = decltype([]<class T>(T a) { return flushed(1.0f / flushed(a)); });
using Exp2Flushed = decltype([]<class T>(T a) { return flushed(std::exp2(flushed(a))); });
using Log2Flushed = decltype([]<class T>(T a) { return std::log2(flushed(a)); });
using Sqrt = decltype([]<class T>(T a) { return std::sqrt(a); });
using Rsqrt = decltype([]<class T>(T a) { return 1 / std::sqrt(a); });

template <class T>
Run float_handler(const Statement& s) {
  const Text name = s.parts[0];
  if (name == "add") return run_float<T, 2, Add>;
  if (name == "sub") return run_float<T, 2, Sub>;
  if (name == "mul") return run_float<T, 2, Mul>;
  if (name == "div") return run_float<T, 2, Div>;
  if (name == "fma" && s.has("rm")) return sizeof(T) == 4 ? run_float<float, 3, FmaDown> : nullptr;
  if (name == "mul" && s.has("sat")) return s.only({"rn", "sat"}) ? run_float<T, 2, MulSaturated> : nullptr;
  const bool flushes = name == "ex2" || name == "lg2" || name == "rcp";
  if (flushes ? !s.only({"rn", "approx", "ftz"}) : !s.only({"rn", "approx", "NaN"})) return nullptr;
  if (s.has("NaN") && name != "max") return nullptr;
  if (name == "fma") return run_float<T, 3, Fma>;
  if (name == "neg") return run_float<T, 1, Neg>;
  if (name == "abs") return run_float<T, 1, Abs>;
  if (name == "min") return s.has("NaN") ? nullptr : run_float<T, 2, Min>;
  if (name == "max") return s.has("NaN") ? run_float<T, 2, MaxOrNan> : run_float<T, 2, Max>;
  if (name == "copysign") return run_float<T, 2, CopySign>;
  if (name == "sqrt") return run_float<T, 1, Sqrt>;
  if (name == "rsqrt") return run_float<T, 1, Rsqrt>;
  if (name == "rcp" && (sizeof(T) == 8 || !s.has("ftz"))) return run_float<T, 1, Rcp>;
  if constexpr (sizeof(T) == 4) {
    if (name == "rcp") return run_float<T, 1, RcpFlushed>;
    if (name == "ex2") return run_float<T, 1, Exp2Flushed>;
    if (name == "lg2") return run_float<T, 1, Log2Flushed>;
  }
  return nullptr;
}

struct Half {
  static double widen(std::uint32_t x) { return f32_of_f16(x); }
  static std::uint32_t narrow(double x) { return f16_of(x); }
};
struct Brain {
  static double widen(std::uint32_t x) { return f32_of_bf16(x & 0xffff); }
  static std::uint32_t narrow(double x) { return bf16_of(static_cast<float>(x)); }
};
using AddDouble = decltype([](double a, double b, double) { return a + b; });
using SubDouble = decltype([](double a, double b, double) { return a - b; });
using MulDouble = decltype([](double a, double b, double) { return a * b; });
using FmaDouble = decltype([](double a, double b, double c) { return std::fma(a, b, c); });
using MinDouble = decltype([](double a, double b, double) { return Min{}(a, b); });
using MaxDouble = decltype([](double a, double b, double) { return Max{}(a, b); });
using MinDoubleOrNan = decltype([](double a, double b, double) {
  return std::isnan(a) || std::isnan(b) ? a + b : Min{}(a, b);
});
using MaxDoubleOrNan = decltype([](double a, double b, double) {
  return std::isnan(a) || std::isnan(b) ? a + b : Max{}(a, b);
});
/// The larger magnitude, with the product of the signs.
using MaxMagnitude = decltype([](double a, double b, double) {
  const double x = std::fmax(std::fabs(a), std::fabs(b));
  return std::signbit(a) != std::signbit(b) ? -x : x;
});
/// The same, a NaN where one of them is one.
using MaxMagnitudeOrNan = decltype([](double a, double b, double c) {
  return std::isnan(a) || std::isnan(b) ? std::fabs(a + b) : MaxMagnitude{}(a, b, c);
});

/// Pairs, each half by itself, in fp64: sums and products are exact there, and with bf16 in fp32 as well.
template <class Type, class Op>
Outcome run_pair(Warp& w, const Instruction& i, Mask m) {
  const auto count = i.operands.size();
  const auto d = w.lanes<std::uint32_t>(i, 0), a = w.lanes<std::uint32_t>(i, 1);
  const auto b = w.lanes<std::uint32_t>(i, count > 2 ? 2 : 1),
             c = w.lanes<std::uint32_t>(i, count > 3 ? 3 : 1);
  each(m, [&](int l) {
    std::uint32_t x = 0;
    for (const int bits : {0, 16}) {
      const auto half = [&](std::uint32_t word) { return Type::widen(word >> bits & 0xffff); };
      x |= (Type::narrow(Op{}(half(a[l]), half(b[l]), half(c[l]))) & 0xffff) << bits;
    }
    d.set(l, x);
  });
  return Outcome::kNext;
}

template <class Type>
Run pair_handler(const Statement& s) {
  const Text name = s.parts[0];
  const bool magnitudes = s.opcode == "max.xorsign.abs.f16x2" || s.opcode == "max.xorsign.abs.bf16x2";
  if (s.opcode == "max.NaN.xorsign.abs.f16x2" || s.opcode == "max.NaN.xorsign.abs.bf16x2") {
    return run_pair<Type, MaxMagnitudeOrNan>;
  }
  if (s.only({"NaN"}) && s.has("NaN")) {
    return name == "min"   ? run_pair<Type, MinDoubleOrNan>
           : name == "max" ? run_pair<Type, MaxDoubleOrNan>
                           : nullptr;
  }
  if (!magnitudes && !s.only({"rn"})) return nullptr;
  if (name == "add") return run_pair<Type, AddDouble>;
  if (name == "sub") return run_pair<Type, SubDouble>;
  if (name == "mul") return run_pair<Type, MulDouble>;
  if (name == "fma" && std::is_same_v<Type, Half>) return run_pair<Type, FmaDouble>;
  if (name == "min") return run_pair<Type, MinDouble>;
  if (name == "max") return magnitudes ? run_pair<Type, MaxMagnitude> : run_pair<Type, MaxDouble>;
  return nullptr;
}

}  // namespace

bool decode_floats(const Statement& s, Operands& o, Instruction& to) {
  const Text name = s.parts[0];
  if (name == "cvt" || name == "mma" || name == "ld" || name == "st" || name == "setp") return false;
  if (s.type() == "f32") {
    to.run = float_handler<float>(s);
  } else if (s.type() == "f64") {
    to.run = float_handler<double>(s);
  } else if (s.type() == "f16x2") {
    to.run = pair_handler<Half>(s);
  } else if (s.type() == "bf16x2") {
    to.run = pair_handler<Brain>(s);
  }
  if (to.run == nullptr) return false;
  o.write(s.operands[0]);
  for (std::size_t n = 1; n < s.operands.size(); ++n)
    o.read(s.operands[n], s.type() == "f64" ? "b64" : "b32");
  return true;
}

}  // namespace halftone::emulator
