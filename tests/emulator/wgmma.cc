// Products of a warpgroup: PTX ISA, "Asynchronous warpgroup level matrix instructions". Each warp computes
// its 16 of the 64 rows when it issues the instruction; the hardware may read shared memory until the batch
// is waited for, which is not shown here.
#include <array>
#include <charconv>
#include <cstring>

#include "tests/emulator/machine.h"
#include "tests/emulator/statement.h"
#include "tests/emulator/types.h"

namespace halftone::emulator {
namespace {

enum class Element : std::uint8_t { kF16, kBf16, kE4m3, kS8 };

constexpr int bytes_of(Element e) { return e == Element::kF16 || e == Element::kBf16 ? 2 : 1; }

/// All codes of e4m3.
const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> x;
    for (std::uint32_t code = 0; code < 256; ++code) x[code] = f32_of_e4m3(code);
    return x;
  }();
  return values;
}

/// The elements of `bytes` bytes.
void widen(Element e, const std::uint8_t* from, int bytes, float* to) {
  for (int n = 0; n < bytes / bytes_of(e); ++n) {
    std::uint16_t half = 0;
    if (bytes_of(e) == 2) std::memcpy(&half, from + 2 * n, 2);
    to[n] = e == Element::kF16    ? f32_of_f16(half)
            : e == Element::kBf16 ? f32_of_bf16(half)
            : e == Element::kE4m3 ? e4m3_values()[from[n]]
                                  : static_cast<float>(static_cast<std::int8_t>(from[n]));
  }
}

constexpr int kChunk = 16;  // bytes that lie together however a matrix does

/// A descriptor of shared memory: where an element of a matrix lies.
struct Matrix {
  std::uint32_t begin, leading, stride;  ///< bytes
  int swizzle;                           ///< 0: none, 1, 2, 3: over 128, 64, 32 bytes

  explicit Matrix(std::uint64_t d)
      : begin(static_cast<std::uint32_t>(d & 0x3fff) << 4),
        leading(static_cast<std::uint32_t>(d >> 16 & 0x3fff) << 4),
        stride(static_cast<std::uint32_t>(d >> 32 & 0x3fff) << 4),
        swizzle(static_cast<int>(d >> 62)) {
    if ((d >> 49 & 7) != 0) throw Fault("a descriptor with a base offset, which the emulator does not know");
  }
  std::uint32_t width() const { return swizzle == 0 ? 16 : 256u >> swizzle; }
  std::uint32_t swizzled(std::uint32_t at) const {
    return swizzle == 0 ? at : at ^ ((at >> 7 & ((8u >> (swizzle - 1)) - 1)) << 4);
  }
  /// Row of M or N, byte along k: k is contiguous.
  std::uint32_t k_major(std::uint32_t row, std::uint32_t byte) const {
    const std::uint32_t at = swizzle == 0 ? row / 8 * stride + row % 8 * 16 + byte / 16 * leading + byte % 16
                                          : row / 8 * stride + row % 8 * width() + byte;
    return swizzled(begin + at);
  }
  /// Row of M or N in bytes (2 an element), step of k: rows are contiguous.
  std::uint32_t mn_major(std::uint32_t row_byte, std::uint32_t k) const {
    const std::uint32_t outer = row_byte / width(), inner = row_byte % width();
    const std::uint32_t at = swizzle == 0 ? outer * stride + k / 8 * leading + k % 8 * 16 + inner
                                          : outer * leading + k / 8 * stride + k % 8 * width() + inner;
    return swizzled(begin + at);
  }
};

/// What the immediate of an instruction tells.
struct Shape {
  int columns;
  Element a, b;
  bool a_registers, b_mn_major;

  std::int64_t packed() const {
    return columns | static_cast<int>(a) << 10 | static_cast<int>(b) << 14 | a_registers << 18 |
           b_mn_major << 19;
  }
  static Shape of(std::int64_t x) {
    return {static_cast<int>(x & 1023), static_cast<Element>(x >> 10 & 15),
            static_cast<Element>(x >> 14 & 15), (x >> 18 & 1) != 0, (x >> 19 & 1) != 0};
  }
};

constexpr int kMaxDepth = 32, kMaxColumns = 256;

/// A of this warp: from its registers, or its rows of the matrix that the descriptor tells.
void take_a(Warp& w, const Instruction& i, const Shape& shape, float (&a)[16][kMaxDepth]) {
  const int bytes = bytes_of(shape.a), first = shape.columns / 2;
  if (!shape.a_registers) {
    const Matrix matrix(w.word(i, first, 0));
    const auto rows = static_cast<std::uint32_t>(w.index % 4 * 16);
    for (std::uint32_t row = 0; row < 16; ++row) {
      for (int at = 0; at < 32; at += kChunk) {
        const std::uint32_t place = matrix.k_major(rows + row, static_cast<std::uint32_t>(at));
        widen(shape.a, shared_bytes(*w.block, place, kChunk), kChunk, a[row] + at / bytes);
      }
    }
    return;
  }
  const int per = 4 / bytes;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int r = 0; r < 4; ++r) {
      const std::uint32_t word = w.lanes<std::uint32_t>(i, first + r)[lane];
      std::uint8_t raw[4];
      std::memcpy(raw, &word, 4);
      widen(shape.a, raw, 4, a[lane / 4 + r % 2 * 8] + lane % 4 * per + r / 2 * 4 * per);
    }
  }
}

void take_b(Warp& w, const Instruction& i, const Shape& shape, float (&b)[kMaxDepth][kMaxColumns]) {
  const int bytes = bytes_of(shape.b), per = kChunk / bytes;
  const Matrix matrix(w.word(i, shape.columns / 2 + (shape.a_registers ? 4 : 1), 0));
  if (shape.b_mn_major) {
    for (int k = 0; k < 32 / bytes; ++k) {
      for (int column = 0; column < shape.columns; column += per) {
        const std::uint32_t place =
            matrix.mn_major(static_cast<std::uint32_t>(column * bytes), static_cast<std::uint32_t>(k));
        widen(shape.b, shared_bytes(*w.block, place, kChunk), kChunk, b[k] + column);
      }
    }
    return;
  }
  for (int column = 0; column < shape.columns; ++column) {
    for (int at = 0; at < 32; at += kChunk) {
      const std::uint32_t place =
          matrix.k_major(static_cast<std::uint32_t>(column), static_cast<std::uint32_t>(at));
      float row[kChunk];
      widen(shape.b, shared_bytes(*w.block, place, kChunk), kChunk, row);
      for (int n = 0; n < per; ++n) b[at / bytes + n][column] = row[n];
    }
  }
}

/// Sums of integers are exact in fp32 up to 2^24, which 32 products of bytes do not reach.
template <class Sum>
Outcome run_wgmma(Warp& w, const Instruction& i, Mask) {
  const Shape shape = Shape::of(i.immediate);
  thread_local float a[16][kMaxDepth], b[kMaxDepth][kMaxColumns], d[16][kMaxColumns];
  take_a(w, i, shape, a);
  take_b(w, i, shape, b);
  const int depth = 32 / bytes_of(shape.b), sums = shape.columns / 2;
  const bool adds = w.predicate(i, static_cast<int>(i.operands.size()) - 1) != 0;
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < shape.columns; ++column) d[row][column] = 0;
    for (int k = 0; k < depth; ++k) {
      const float x = a[row][k];
      for (int column = 0; column < shape.columns; ++column) d[row][column] += x * b[k][column];
    }
  }
  for (int n = 0; n < sums; ++n) {
    const auto sum = w.lanes<Sum>(i, n);
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto x = static_cast<Sum>(d[lane / 4 + n % 4 / 2 * 8][n / 4 * 8 + lane % 4 * 2 + n % 2]);
      sum.set(lane, adds ? sum[lane] + x : x);
    }
  }
  return Outcome::kNext;
}

Element element_of(std::string_view type) {
  return type == "f16"    ? Element::kF16
         : type == "bf16" ? Element::kBf16
         : type == "e4m3" ? Element::kE4m3
                          : Element::kS8;
}

}  // namespace

bool decode_wgmma(const Statement& s, Operands& o, Instruction& to) {
  if (s.parts[0] != "wgmma") return false;
  to.together = true;
  if (!s.has("mma_async")) {
    to.run = run_nothing;
    return s.has("fence") || s.has("commit_group") || s.has("wait_group");
  }
  // wgmma.mma_async.sync.aligned.m64nNkK.d.a.b
  const std::size_t types = s.parts.size() - 3;
  const std::string_view size = s.parts[types - 1];
  Shape shape{};
  std::from_chars(size.data() + size.find('n') + 1, size.data() + size.size(), shape.columns);
  shape.a = element_of(s.parts[types + 1]);
  shape.b = element_of(s.parts[types + 2]);
  std::size_t n = 0;
  for (; n < static_cast<std::size_t>(shape.columns) / 2; ++n) o.update(s.operands[n]);
  // A is four registers or a descriptor: then come B, the predicate and constants.
  const std::size_t rest = s.operands.size() - n;
  const bool bytes = bytes_of(shape.a) == 1;
  const std::size_t constants = shape.a == Element::kE4m3 ? 2 : bytes ? 0 : 4;
  shape.a_registers = rest == 4 + 1 + 1 + (bytes ? constants : 3);
  if (!shape.a_registers && rest != 1 + 1 + 1 + constants) return false;
  for (int r = 0; r < (shape.a_registers ? 4 : 1); ++r)
    o.read(s.operands[n++], shape.a_registers ? "b32" : "b64");
  o.read(s.operands[n++], "b64");
  o.read(s.operands[n++], "pred");
  for (const std::size_t signs = n; n < std::min(signs + 2, s.operands.size()); ++n) {
    if (o.integer(s.operands[n]) != 1) return false;
  }
  if (!bytes) {
    if (!shape.a_registers && o.integer(s.operands[n++]) != 0) return false;
    shape.b_mn_major = o.integer(s.operands[n]) != 0;
  }
  to.immediate = shape.packed();
  to.run = s.parts[types] == "s32" ? run_wgmma<std::int32_t> : run_wgmma<float>;
  return true;
}

}  // namespace halftone::emulator
