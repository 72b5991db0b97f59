// Loads, stores and atomic operations of one thread.
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <type_traits>

#include "tests/emulator/machine.h"
#include "tests/emulator/statement.h"
#include "tests/emulator/types.h"

namespace halftone::emulator {
namespace {

using Text = std::string_view;

enum Space { kGeneric, kGlobal, kShared };

Space space_of(const Statement& s) {
  for (const Text part : s.parts) {
    if (part.starts_with("shared")) return kShared;
    if (part == "global") return kGlobal;
  }
  return kGeneric;
}

template <Space kSpace>
std::uint8_t* at(Warp& w, const Instruction& i, int operand, int lane, std::size_t bytes) {
  const std::uint64_t address = w.word(i, operand, lane) + static_cast<std::uint64_t>(i.immediate);
  if (address % bytes != 0 && std::has_single_bit(bytes))
    throw Fault("an address that is no multiple of the access");
  if constexpr (kSpace == kShared) {
    return shared_bytes(*w.block, static_cast<std::uint32_t>(address), bytes);
  } else if constexpr (kSpace == kGlobal) {
    return global_bytes(address, bytes);
  } else {
    return generic_bytes(w, address, bytes);
  }
}

/// Vectors of kCount elements; signed ones extend into their registers.
template <class T, int kCount, Space kSpace>
Outcome run_load(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) {
    const std::uint8_t* from = at<kSpace>(w, i, kCount, lane, sizeof(T) * kCount);
    T x[kCount];
    std::memcpy(x, from, sizeof x);
    for (int n = 0; n < kCount; ++n) {
      w.set_word(i, n, lane, static_cast<std::uint64_t>(static_cast<std::int64_t>(x[n])));
    }
  });
  return Outcome::kNext;
}
template <class T, int kCount, Space kSpace>
Outcome run_store(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) {
    std::uint8_t* to = at<kSpace>(w, i, 0, lane, sizeof(T) * kCount);
    T x[kCount];
    for (int n = 0; n < kCount; ++n) x[n] = static_cast<T>(w.word(i, 1 + n, lane));
    std::memcpy(to, x, sizeof x);
  });
  return Outcome::kNext;
}

template <class T, int kCount, bool kLoads>
Run of_space(Space space) {
  const auto pick = [&]<Space kSpace>() -> Run {
    if constexpr (kLoads) {
      return run_load<T, kCount, kSpace>;
    } else {
      return run_store<T, kCount, kSpace>;
    }
  };
  return space == kShared   ? pick.template operator()<kShared>()
         : space == kGlobal ? pick.template operator()<kGlobal>()
                            : pick.template operator()<kGeneric>();
}

template <bool kLoads>
bool decode_access(const Statement& s, Operands& o, Instruction& to) {
  const int count = s.has("v4") ? 4 : s.has("v2") ? 2 : 1;
  const std::string type = s.type() == "f32" ? "b32" : s.type() == "f64" ? "b64" : std::string(s.type());
  const bool known = with_integer(type, [&]<class T>() {
    to.run = count == 4   ? of_space<T, 4, kLoads>(space_of(s))
             : count == 2 ? of_space<T, 2, kLoads>(space_of(s))
                          : of_space<T, 1, kLoads>(space_of(s));
  });
  if (!known) return false;
  if (kLoads) {
    for (int n = 0; n < count; ++n) o.write(s.operands[static_cast<std::size_t>(n)]);
    o.address(s.operands[static_cast<std::size_t>(count)]);
  } else {
    o.address(s.operands[0]);
    for (int n = 1; n <= count; ++n) o.read(s.operands[static_cast<std::size_t>(n)], type);
  }
  return true;
}

template <class T>
struct Exchange {
  T operator()(T, T b) const { return b; }
};
template <class T>
struct Least {
  T operator()(T a, T b) const { return std::min(a, b); }
};
template <class T>
struct Largest {
  T operator()(T a, T b) const { return std::max(a, b); }
};

/// kResult: operand 0 gets what was there.
template <class T, class Op, Space kSpace, bool kResult>
Outcome run_atomic(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) {
    std::uint8_t* place = at<kSpace>(w, i, kResult ? 1 : 0, lane, sizeof(T));
    T before;
    std::memcpy(&before, place, sizeof before);
    const T after = Op{}(before, static_cast<T>(w.word(i, kResult ? 2 : 1, lane)));
    std::memcpy(place, &after, sizeof after);
    if (kResult) w.set_word(i, 0, lane, static_cast<std::uint64_t>(before));
  });
  return Outcome::kNext;
}
template <class T, class Op>
Run atomic(Space space, bool result) {
  if (space == kShared) return result ? run_atomic<T, Op, kShared, true> : run_atomic<T, Op, kShared, false>;
  return result ? run_atomic<T, Op, kGlobal, true> : run_atomic<T, Op, kGlobal, false>;
}
template <class T>
Run atomic_of(const Statement& s, bool result) {
  using Unsigned = std::make_unsigned_t<T>;  // wraps
  const Space space = space_of(s);
  if (s.has("add")) return atomic<Unsigned, std::plus<Unsigned>>(space, result);
  if (s.has("or")) return atomic<T, std::bit_or<T>>(space, result);
  if (s.has("and")) return atomic<T, std::bit_and<T>>(space, result);
  if (s.has("exch")) return atomic<T, Exchange<T>>(space, result);
  if (s.has("min")) return atomic<T, Least<T>>(space, result);
  if (s.has("max")) return atomic<T, Largest<T>>(space, result);
  return nullptr;
}

/// red.add of four floats.
Outcome run_add_floats(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) {
    std::uint8_t* place = at<kGlobal>(w, i, 0, lane, 4 * sizeof(float));
    float x[4];
    std::memcpy(x, place, sizeof x);
    for (int n = 0; n < 4; ++n)
      x[n] += std::bit_cast<float>(static_cast<std::uint32_t>(w.word(i, 1 + n, lane)));
    std::memcpy(place, x, sizeof x);
  });
  return Outcome::kNext;
}

bool decode_atomic(const Statement& s, Operands& o, Instruction& to) {
  const bool result = s.parts[0] == "atom";
  if (!result && s.type() == "f32" && s.has("add") && s.has("v4") && space_of(s) == kGlobal) {
    to.run = run_add_floats;
    o.address(s.operands[0]);
    for (std::size_t n = 1; n <= 4; ++n) o.read(s.operands[n], "b32");
    return true;
  }
  if (space_of(s) == kGeneric || !is_integer(s.type()) || s.type().ends_with("16")) return false;
  with_integer(s.type(), [&]<class T>() { to.run = atomic_of<T>(s, result); });
  if (to.run == nullptr) return false;
  std::size_t n = 0;
  if (result) o.write(s.operands[n++]);
  o.address(s.operands[n++]);
  o.read(s.operands[n], s.type());
  return true;
}

Outcome run_policy(Warp& w, const Instruction& i, Mask m) {
  each(m, [&](int lane) { w.set_word(i, 0, lane, 0); });
  return Outcome::kNext;
}

}  // namespace

bool decode_memory(const Statement& s, Operands& o, Instruction& to) {
  const Text name = s.parts[0];
  if (name == "ld" || name == "ldu") return decode_access<true>(s, o, to);
  if (name == "st") return decode_access<false>(s, o, to);
  if (name == "atom" || name == "red") return decode_atomic(s, o, to);
  if (name == "createpolicy") {
    o.write(s.operands[0]);
    to.run = run_policy;
    return true;
  }
  if (name == "membar" || name == "fence" || name == "prefetch" || name == "griddepcontrol" ||
      name == "setmaxnreg" || name == "nanosleep" || s.opcode.starts_with("cp.async.bulk.prefetch")) {
    to.run = run_nothing;
    return true;
  }
  return false;
}

}  // namespace halftone::emulator
