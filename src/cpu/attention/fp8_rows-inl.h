// Blocked path, Arithmetic::kFp8: rows of Q and K as E4M3 with a power of two each (format/fp8_row.h). Codes
// are fp32 here, and so is their product.

#include "cpu/attention/int8_rows-inl.h"
#include "format/fp8_row.h"

#if defined(HALFTONE_CPU_FP8_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HALFTONE_CPU_FP8_ROWS_INL_H
#undef HALFTONE_CPU_FP8_ROWS_INL_H
#else
#define HALFTONE_CPU_FP8_ROWS_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace halftone::cpu {
namespace HWY_NAMESPACE {

/// The E4M3 nearest to x, ties to even, for |x| <= 448: codec::e4m3_from_f32() and back.
HWY_INLINE VF round_e4m3(VF x) {
  const F d;
  const I di;
  const VI a = magnitude_bits(x);
  const VI odd = hn::And(hn::ShiftRight<20>(a), hn::Set(di, 1));
  const VI normal =
      hn::And(hn::Add(hn::Add(a, hn::Set(di, 0x7ffff)), odd), hn::Set(di, static_cast<int>(0xfff00000)));
  const VF magic = hn::Set(d, 12582912.0f / 512);  // below 2^-6 the step is 2^-9
  const VF tiny = hn::Sub(hn::Add(hn::BitCast(d, a), magic), magic);
  const auto small = hn::RebindMask(d, hn::Lt(a, hn::Set(di, 0x3c800000)));
  return hn::CopySignToAbs(hn::IfThenElse(small, tiny, hn::BitCast(d, normal)), x);
}

/// Replaces a row of `width` values, whole vectors, by its codes' values, and returns its scale. Without a
/// finite one, codes are zeros.
HWY_INLINE float make_fp8_codes(float* x, int width) {
  const F d;
  const fp8_row::Row row = fp8_row::row_of(largest_bits(x, width));
  for (int i = 0; i < width; i += kLanes) {
    const VF code = round_e4m3(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, row.inverse)));
    hn::StoreU(row.inverse == 0.0f ? hn::Zero(d) : code, d, x + i);
  }
  return row.scale;
}

}  // namespace HWY_NAMESPACE
}  // namespace halftone::cpu
HWY_AFTER_NAMESPACE();

#endif  // HALFTONE_CPU_FP8_ROWS_INL_H
