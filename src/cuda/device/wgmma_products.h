// Products of a warpgroup, of any shape: wgmma_add() and wgmma_first(), at the end of this file. The
// instruction names every register of d, so an asm statement serves one N: the preprocessor writes one for
// each, and a template keeps the one it needs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "halftone/types.h"

namespace halftone::cuda {

/// Whether wgmma multiplies A and B of these types where B has this many columns.
constexpr bool wgmma_exists(DType a, DType b, int columns) {
  if (columns % 8 != 0 || columns < 8 || columns > 256) return false;
  if (a == DType::kInt8) return b == a && (columns % 16 == 0 || columns == 8 || columns == 24);
  return a == b && (a == DType::kFloat16 || a == DType::kBFloat16 || a == DType::kFloat8E4M3);
}

namespace wgmma_text {
inline constexpr char kF16[] = "k16.f32.f16.f16", kBf16[] = "k16.f32.bf16.bf16";
inline constexpr char kE4m3[] = "k32.f32.e4m3.e4m3", kS8[] = "k32.s32.s8.s8";
// What follows scale-d: signs; of 16-bit types, too, whether A (in shared memory) and B are MN-major.
inline constexpr char kNone[] = "", kSigns[] = ", 1, 1";
inline constexpr char kRs[] = ", 1, 1, 0", kRsMnMajor[] = ", 1, 1, 1";
inline constexpr char kSs[] = ", 1, 1, 0, 0", kSsMnMajor[] = ", 1, 1, 0, 1";
}  // namespace wgmma_text

/// The text of a product before and after its operands.
template <DType kA, DType kB, bool kMnMajorB, class Sum, int kColumns, class A>
struct WgmmaText {
  static_assert(wgmma_exists(kA, kB, kColumns),
                "wgmma has no such product: A and B are both float16, bfloat16 or float8 e4m3 and N is a "
                "multiple of 8 up to 256, or both are int8 and N is 8, 24 or a multiple of 16.");
  static_assert(!kMnMajorB || dtype_bits(kA) == 16, "wgmma takes B of 8-bit elements K-major only.");
  static_assert(std::is_same_v<Sum, std::conditional_t<kA == DType::kInt8, std::int32_t, float>>,
                "wgmma adds products of integers in std::int32_t, others in float.");
  static constexpr bool kRegisters = std::is_same_v<A, std::uint32_t[4]>;
  static_assert(kRegisters || std::is_same_v<A, std::uint64_t>,
                "wgmma takes A as a fragment, std::uint32_t[4], or as a descriptor, std::uint64_t.");
  static constexpr const char* kTypes = kA == DType::kFloat16    ? wgmma_text::kF16
                                        : kA == DType::kBFloat16 ? wgmma_text::kBf16
                                        : kA == DType::kInt8     ? wgmma_text::kS8
                                                                 : wgmma_text::kE4m3;
  static constexpr const char* kFlags = kA == DType::kInt8    ? wgmma_text::kNone
                                        : dtype_bits(kA) == 8 ? wgmma_text::kSigns
                                        : kRegisters ? (kMnMajorB ? wgmma_text::kRsMnMajor : wgmma_text::kRs)
                                                     : (kMnMajorB ? wgmma_text::kSsMnMajor : wgmma_text::kSs);
};

// clang-format off
// Four registers of d as operands of constraint c, and as their places in the text; those of N columns; and
// for each N: X(c, s, N, the places of the eight operands after d).
#define HALFTONE_OPERANDS(c, i, j, k, l) c(d[i]), c(d[j]), c(d[k]), c(d[l])
#define HALFTONE_PLACES(c, i, j, k, l) %i, %j, %k, %l
#define HALFTONE_D8(M, c) M(c, 0, 1, 2, 3)
#define HALFTONE_D16(M, c) HALFTONE_D8(M, c), M(c, 4, 5, 6, 7)
#define HALFTONE_D24(M, c) HALFTONE_D16(M, c), M(c, 8, 9, 10, 11)
#define HALFTONE_D32(M, c) HALFTONE_D24(M, c), M(c, 12, 13, 14, 15)
#define HALFTONE_D40(M, c) HALFTONE_D32(M, c), M(c, 16, 17, 18, 19)
#define HALFTONE_D48(M, c) HALFTONE_D40(M, c), M(c, 20, 21, 22, 23)
#define HALFTONE_D56(M, c) HALFTONE_D48(M, c), M(c, 24, 25, 26, 27)
#define HALFTONE_D64(M, c) HALFTONE_D56(M, c), M(c, 28, 29, 30, 31)
#define HALFTONE_D72(M, c) HALFTONE_D64(M, c), M(c, 32, 33, 34, 35)
#define HALFTONE_D80(M, c) HALFTONE_D72(M, c), M(c, 36, 37, 38, 39)
#define HALFTONE_D88(M, c) HALFTONE_D80(M, c), M(c, 40, 41, 42, 43)
#define HALFTONE_D96(M, c) HALFTONE_D88(M, c), M(c, 44, 45, 46, 47)
#define HALFTONE_D104(M, c) HALFTONE_D96(M, c), M(c, 48, 49, 50, 51)
#define HALFTONE_D112(M, c) HALFTONE_D104(M, c), M(c, 52, 53, 54, 55)
#define HALFTONE_D120(M, c) HALFTONE_D112(M, c), M(c, 56, 57, 58, 59)
#define HALFTONE_D128(M, c) HALFTONE_D120(M, c), M(c, 60, 61, 62, 63)
#define HALFTONE_D136(M, c) HALFTONE_D128(M, c), M(c, 64, 65, 66, 67)
#define HALFTONE_D144(M, c) HALFTONE_D136(M, c), M(c, 68, 69, 70, 71)
#define HALFTONE_D152(M, c) HALFTONE_D144(M, c), M(c, 72, 73, 74, 75)
#define HALFTONE_D160(M, c) HALFTONE_D152(M, c), M(c, 76, 77, 78, 79)
#define HALFTONE_D168(M, c) HALFTONE_D160(M, c), M(c, 80, 81, 82, 83)
#define HALFTONE_D176(M, c) HALFTONE_D168(M, c), M(c, 84, 85, 86, 87)
#define HALFTONE_D184(M, c) HALFTONE_D176(M, c), M(c, 88, 89, 90, 91)
#define HALFTONE_D192(M, c) HALFTONE_D184(M, c), M(c, 92, 93, 94, 95)
#define HALFTONE_D200(M, c) HALFTONE_D192(M, c), M(c, 96, 97, 98, 99)
#define HALFTONE_D208(M, c) HALFTONE_D200(M, c), M(c, 100, 101, 102, 103)
#define HALFTONE_D216(M, c) HALFTONE_D208(M, c), M(c, 104, 105, 106, 107)
#define HALFTONE_D224(M, c) HALFTONE_D216(M, c), M(c, 108, 109, 110, 111)
#define HALFTONE_D232(M, c) HALFTONE_D224(M, c), M(c, 112, 113, 114, 115)
#define HALFTONE_D240(M, c) HALFTONE_D232(M, c), M(c, 116, 117, 118, 119)
#define HALFTONE_D248(M, c) HALFTONE_D240(M, c), M(c, 120, 121, 122, 123)
#define HALFTONE_D256(M, c) HALFTONE_D248(M, c), M(c, 124, 125, 126, 127)
#define HALFTONE_EACH_N(X, c, s)                                                                            \
  X(c, s, 8, 4, 5, 6, 7, 8, 9, 10, 11) X(c, s, 16, 8, 9, 10, 11, 12, 13, 14, 15)                            \
  X(c, s, 24, 12, 13, 14, 15, 16, 17, 18, 19) X(c, s, 32, 16, 17, 18, 19, 20, 21, 22, 23)                   \
  X(c, s, 40, 20, 21, 22, 23, 24, 25, 26, 27) X(c, s, 48, 24, 25, 26, 27, 28, 29, 30, 31)                   \
  X(c, s, 56, 28, 29, 30, 31, 32, 33, 34, 35) X(c, s, 64, 32, 33, 34, 35, 36, 37, 38, 39)                   \
  X(c, s, 72, 36, 37, 38, 39, 40, 41, 42, 43) X(c, s, 80, 40, 41, 42, 43, 44, 45, 46, 47)                   \
  X(c, s, 88, 44, 45, 46, 47, 48, 49, 50, 51) X(c, s, 96, 48, 49, 50, 51, 52, 53, 54, 55)                   \
  X(c, s, 104, 52, 53, 54, 55, 56, 57, 58, 59) X(c, s, 112, 56, 57, 58, 59, 60, 61, 62, 63)                 \
  X(c, s, 120, 60, 61, 62, 63, 64, 65, 66, 67) X(c, s, 128, 64, 65, 66, 67, 68, 69, 70, 71)                 \
  X(c, s, 136, 68, 69, 70, 71, 72, 73, 74, 75) X(c, s, 144, 72, 73, 74, 75, 76, 77, 78, 79)                 \
  X(c, s, 152, 76, 77, 78, 79, 80, 81, 82, 83) X(c, s, 160, 80, 81, 82, 83, 84, 85, 86, 87)                 \
  X(c, s, 168, 84, 85, 86, 87, 88, 89, 90, 91) X(c, s, 176, 88, 89, 90, 91, 92, 93, 94, 95)                 \
  X(c, s, 184, 92, 93, 94, 95, 96, 97, 98, 99) X(c, s, 192, 96, 97, 98, 99, 100, 101, 102, 103)             \
  X(c, s, 200, 100, 101, 102, 103, 104, 105, 106, 107) X(c, s, 208, 104, 105, 106, 107, 108, 109, 110, 111) \
  X(c, s, 216, 108, 109, 110, 111, 112, 113, 114, 115) X(c, s, 224, 112, 113, 114, 115, 116, 117, 118, 119) \
  X(c, s, 232, 116, 117, 118, 119, 120, 121, 122, 123) X(c, s, 240, 120, 121, 122, 123, 124, 125, 126, 127) \
  X(c, s, 248, 124, 125, 126, 127, 128, 129, 130, 131) X(c, s, 256, 128, 129, 130, 131, 132, 133, 134, 135)
// clang-format on

#define HALFTONE_TEXT(...) HALFTONE_TEXT_OF(__VA_ARGS__)
#define HALFTONE_TEXT_OF(...) #__VA_ARGS__
// The product with n columns. ab: A and B in the text; s, types, flags: places; then the operands after d.
#define HALFTONE_WGMMA(c, n, ab, s, types, flags, ...)                                                   \
  if constexpr (kColumns == n) {                                                                         \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #s ", 0;\n wgmma.mma_async.sync.aligned.m64n" #n \
                 "%" #types " {" HALFTONE_TEXT(HALFTONE_D##n(HALFTONE_PLACES, )) "}, " ab ", p%" #flags  \
                                                                                 ";\n}"                  \
                 : HALFTONE_D##n(HALFTONE_OPERANDS, c)                                                   \
                 : __VA_ARGS__, "C"(Text::kTypes), "C"(Text::kFlags));                                   \
  }
// With A in registers, and as a descriptor.
#define HALFTONE_RS(c, s, n, i, j, k, l, m, o, p, q)                                                \
  HALFTONE_WGMMA(c, n, "{%" #i ", %" #j ", %" #k ", %" #l "}, %" #m, o, p, q, "r"(a[0]), "r"(a[1]), \
                 "r"(a[2]), "r"(a[3]), "l"(b), s)
#define HALFTONE_SS(c, s, n, i, j, k, l, m, o, p, q) \
  HALFTONE_WGMMA(c, n, "%" #i ", %" #j, k, l, m, "l"(a), "l"(b), s)
// All products, of which the template's arguments pick one. access: + or =, of d; s: the operand scale-d.
#define HALFTONE_PRODUCTS(access, s)                              \
  constexpr int kColumns = 2 * kSums;                             \
  using Text = WgmmaText<kA, kB, kMnMajorB, Sum, kColumns, A>;    \
  if constexpr (Text::kRegisters && std::is_same_v<Sum, float>) { \
    HALFTONE_EACH_N(HALFTONE_RS, access "f", s)                   \
  } else if constexpr (Text::kRegisters) {                        \
    HALFTONE_EACH_N(HALFTONE_RS, access "r", s)                   \
  } else if constexpr (std::is_same_v<Sum, float>) {              \
    HALFTONE_EACH_N(HALFTONE_SS, access "f", s)                   \
  } else {                                                        \
    HALFTONE_EACH_N(HALFTONE_SS, access "r", s)                   \
  }

/// d += a b: 64 rows of A, 2 kSums columns of B, 32 bytes of either along k. a: of each warp the A fragment
/// of mma.m16n8k16 or, of bytes, m16n8k32, or the descriptor of a K-major matrix. b: a descriptor. d: per 8
/// columns the fragment of mma. Begun by wgmma_begin(), complete after wgmma_wait().
template <DType kA, DType kB = kA, bool kMnMajorB = false, class Sum, int kSums, class A>
__device__ inline void wgmma_add(Sum (&d)[kSums], const A& a, std::uint64_t b) {
  HALFTONE_PRODUCTS("+", "n"(1))
}
/// d = a b, plus d if `add`, which is decided at run time.
template <DType kA, DType kB = kA, bool kMnMajorB = false, class Sum, int kSums, class A>
__device__ inline void wgmma_add_if(bool add, Sum (&d)[kSums], const A& a, std::uint64_t b) {
  HALFTONE_PRODUCTS("+", "r"(static_cast<int>(add)))
}
/// d = a b.
template <DType kA, DType kB = kA, bool kMnMajorB = false, class Sum, int kSums, class A>
__device__ inline void wgmma_first(Sum (&d)[kSums], const A& a, std::uint64_t b) {
  HALFTONE_PRODUCTS("=", "n"(0))
}

#undef HALFTONE_PRODUCTS
#undef HALFTONE_SS
#undef HALFTONE_RS
#undef HALFTONE_WGMMA
#undef HALFTONE_TEXT_OF
#undef HALFTONE_TEXT
#undef HALFTONE_PLACES
#undef HALFTONE_OPERANDS
#undef HALFTONE_EACH_N

}  // namespace halftone::cuda
