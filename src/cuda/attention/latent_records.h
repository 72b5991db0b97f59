// How tokens of latent caches are stored, as far as the kernels know them. Plain C++.
#pragma once

#include "halftone/cache.h"

namespace halftone::cuda {

/// A record of the latent cache; its 64 rotary dims are bf16.
enum class LatentCodes : std::uint8_t {
  kFp8,       ///< 512 e4m3, 4 f32 scales: 656 bytes
  kFp8Apart,  ///< 448 e4m3: 576 bytes; 7 e8m0 scales behind the page's records. V is all of K
  kInt8,      ///< 512 int8, 8 f16 scales: 656 bytes
  kInt4,      ///< 512 unsigned int4, 8 f16 scales and mins: 416 bytes
  kBf16,      ///< 512 bf16: 1152 bytes
};

/// What follows from it. docs/formats.md, The latent page.
template <LatentCodes kCodes>
struct LatentRecord {
  static constexpr int kDim = 512, kRope = 64;                      // of V; the rotary dims
  static constexpr bool kApart = kCodes == LatentCodes::kFp8Apart;  // scales behind the page's records
  static constexpr bool kBf16 = kCodes == LatentCodes::kBf16;
  static constexpr bool kInteger = kCodes == LatentCodes::kInt8 || kCodes == LatentCodes::kInt4;
  static constexpr int kLatent = kApart ? kDim - kRope : kDim, kKeyDim = kLatent + kRope;
  static constexpr int kGroupDims = kCodes == LatentCodes::kFp8 || kBf16 ? 128 : 64;  // they share a scale
  static constexpr int kGroups = kLatent / kGroupDims;
  static constexpr int kBits = kBf16 ? 16 : kCodes == LatentCodes::kInt4 ? 4 : 8;  // of a code
  static constexpr int kRowBytes = kLatent * kBits / 8;                            // of codes
  static constexpr DType kScaleType = kCodes == LatentCodes::kFp8 ? DType::kFloat32
                                      : kApart                    ? DType::kFloat8E8M0
                                                                  : DType::kFloat16;
  // A token's scales, mins included.
  static constexpr int kScaleBytes = kBf16                         ? 0
                                     : kCodes == LatentCodes::kFp8 ? 4 * kGroups
                                     : kApart                      ? 8
                                                                   : 2 * kGroups * (kBits == 4 ? 2 : 1);
  static constexpr int kScalesAt = kRowBytes;  // of a record, unless they lie apart
  static constexpr int kRopeAt = kScalesAt + (kApart ? 0 : kScaleBytes);
  static constexpr int kRecordBytes = kRopeAt + 2 * kRope;
};

/// Whether records of a valid latent cache are such, and a kernel takes queries of the type. bf16 records are
/// multiplied with queries in bf16.
constexpr bool serves(LatentCodes codes, const KvCacheSpec& kv, DType q_type) {
  const KvFormat& f = kv.k_format;
  const bool whole = kv.latent_dim() == 512;  // beside the rotary dims, and all of V
  const auto grouped = [&](DType type, int group, DType scale, bool asymmetric) {
    return f.dtype == type && f.granularity == Granularity::kGroup && f.group_size == group &&
           f.scale_dtype == scale && f.asymmetric == asymmetric;
  };
  if (kv.rope_dim != 64 || kv.v_dim() != 512) return false;
  switch (codes) {
    case LatentCodes::kFp8:
      return whole && grouped(DType::kFloat8E4M3, 128, DType::kFloat32, false);
    case LatentCodes::kFp8Apart:
      return kv.latent_dim() == 448 && grouped(DType::kFloat8E4M3, 64, DType::kFloat8E8M0, false);
    case LatentCodes::kInt8:
      return whole && grouped(DType::kInt8, 64, DType::kFloat16, false);
    case LatentCodes::kInt4:
      return whole && grouped(DType::kInt4, 64, DType::kFloat16, true);
    case LatentCodes::kBf16:
      return whole && f.dtype == DType::kBFloat16 && q_type == DType::kBFloat16;
  }
  return false;
}

}  // namespace halftone::cuda
