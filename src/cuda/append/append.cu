#include <algorithm>

#include "cuda/append/few_rows.h"
#include "cuda/append/params.h"
#include "cuda/device/launch.h"

namespace halftone::cuda {
namespace {

constexpr int kRowThreads = 128;

template <AppendScale kScale>
constexpr int kWindowWarps = kScale == AppendScale::kToken ? kMeetWarps : kAppendWarps;

/// blockIdx.z and on from `first`: 0 for K, 1 for V.
template <DType kType, bool kAsymmetric, AppendScale kScale, bool kPlain>
__global__ void __launch_bounds__(kWindowWarps<kScale> * 32, kPlain ? (kScale == AppendScale::kRow ? 5 : 6)
                                                             : kScale == AppendScale::kToken ? 1
                                                                                             : 4)
    append_windows(const __grid_constant__ AppendParams params, const int first) {
  __shared__ AppendShared shared;
  begin_append(params);
  using Traits = AppendTraits<kType, kAsymmetric, kScale, kPlain ? RowKind::kPlain : RowKind::kAny>;
  if (!kPlain) {
    Appender<Traits>(params, params.parts[first + blockIdx.z], shared).run();
  } else if (first + blockIdx.z == 0) {
    Appender<Traits, KvPart::kK>(params, params.parts[0], shared).run();
  } else {
    Appender<Traits, KvPart::kV>(params, params.parts[1], shared).run();
  }
}

/// The same of wide rows.
template <DType kType, bool kAsymmetric, AppendScale kScale>
__global__ void __launch_bounds__(kWindowWarps<kScale> * 32, kScale == AppendScale::kToken ? 1 : 2)
    append_wide_windows(const __grid_constant__ AppendParams params, const int first) {
  __shared__ AppendShared shared;
  begin_append(params);
  using Traits = AppendTraits<kType, kAsymmetric, kScale, RowKind::kAny>;
  Appender<Traits, KvPart::kK, 2>(params, params.parts[first + blockIdx.z], shared).run();
}

/// The same of blockIdx.x: V, whose stores are more, then has as many multiprocessors as K.
template <DType kType, bool kAsymmetric, AppendScale kScale, RowKind kKind>
__global__ void __launch_bounds__(kRowThreads, 8)
    append_single_rows(const __grid_constant__ AppendParams params, const int first) {
  append_rows<AppendTraits<kType, kAsymmetric, kScale, kKind>>(params, params.parts[first + blockIdx.x]);
}

enum class Variant : std::uint8_t { kWindows, kPlainWindows, kWideWindows, kRows, kWholeRows, kPlainRows };

/// Formats that no name of named_formats() stands for take rows of any kind: their append is correct, not
/// fast.
template <DType kType, bool kAsymmetric, AppendScale kScale>
constexpr bool kNamed = kAsymmetric == (kType == DType::kInt4) &&
                        !(kType == DType::kInt4 && kScale == AppendScale::kGiven);

template <DType kType, bool kAsymmetric, AppendScale kScale>
const void* kernel_of(Variant variant) {
  if (variant == Variant::kWideWindows)
    return reinterpret_cast<const void*>(&append_wide_windows<kType, kAsymmetric, kScale>);
  if constexpr (kScale != AppendScale::kToken) {
    constexpr bool kFast = kNamed<kType, kAsymmetric, kScale>;
    constexpr RowKind kWhole = kFast ? RowKind::kWhole : RowKind::kAny;
    constexpr RowKind kPlain = kFast ? RowKind::kPlain : RowKind::kAny;
    if (variant == Variant::kRows)
      return reinterpret_cast<const void*>(&append_single_rows<kType, kAsymmetric, kScale, RowKind::kAny>);
    if (variant == Variant::kWholeRows)
      return reinterpret_cast<const void*>(&append_single_rows<kType, kAsymmetric, kScale, kWhole>);
    if (variant == Variant::kPlainRows)
      return reinterpret_cast<const void*>(&append_single_rows<kType, kAsymmetric, kScale, kPlain>);
    if (variant == Variant::kPlainWindows)
      return reinterpret_cast<const void*>(&append_windows<kType, kAsymmetric, kScale, kFast>);
  }
  return reinterpret_cast<const void*>(&append_windows<kType, kAsymmetric, kScale, false>);
}

template <DType kType, bool kAsymmetric = false>
const void* kernel_of(const KvFormat& format, Variant variant) {
  if constexpr (dtype_bits(kType) != 16) {
    if (format.granularity == Granularity::kToken)
      return kernel_of<kType, kAsymmetric, AppendScale::kToken>(variant);
    if (format.dynamic_scale()) return kernel_of<kType, kAsymmetric, AppendScale::kRow>(variant);
  }
  return kernel_of<kType, kAsymmetric, AppendScale::kGiven>(variant);
}

const void* kernel_of(const KvFormat& format, Variant variant) {
  const bool asymmetric = format.asymmetric;
  switch (format.dtype) {
    case DType::kFloat16:
      return kernel_of<DType::kFloat16>(format, variant);
    case DType::kFloat8E4M3:
      return kernel_of<DType::kFloat8E4M3>(format, variant);
    case DType::kInt8:
      return asymmetric ? kernel_of<DType::kInt8, true>(format, variant)
                        : kernel_of<DType::kInt8>(format, variant);
    case DType::kInt4:
      return asymmetric ? kernel_of<DType::kInt4, true>(format, variant)
                        : kernel_of<DType::kInt4>(format, variant);
    default:
      return kernel_of<DType::kBFloat16>(format, variant);
  }
}

/// How an append of one part, or of two alike, is launched.
struct AppendLaunch {
  const void* kernel;
  dim3 grid;
  int threads;
  int shared_bytes;
};

/// Shared memory that few rows ask for and do not use, where their CTAs begin before the kernel before them
/// has ended: no more than four then wait on the first multiprocessors that it leaves, and share their
/// stores.
constexpr int kSpread = 45 * 1024;
constexpr std::int64_t kSpreadBlocks = 256;  // at most: of more there is not room for all at once

/// Where scales are shared and there are so many CTAs, they have one warp for up to eight heads: fewer warps
/// wait at barriers while one of them looks for slots, and those of other CTAs compute meanwhile.
constexpr std::int64_t kLoneWarps = 2048;

AppendLaunch launch_of(const AppendParams& params, const AppendPart& a, RowKind kind, unsigned parts) {
  constexpr std::int64_t kFewWarps = 1 << 11;  // of rows of one part: all of both are under way at once
  const bool meets = a.part.format.granularity == Granularity::kToken, wide = is_wide(a.part.dim);
  const int rows = kRowThreads >> a.segment_log2;  // of a CTA that takes rows
  const auto blocks = [&](int heads) { return static_cast<unsigned>((params.kv_heads + heads - 1) / heads); };
  const int lanes = std::min(params.kv_heads, rows) << a.segment_log2, row_warps = (lanes + 31) / 32;
  if (!meets && !wide && params.tokens * blocks(rows) * row_warps <= kFewWarps) {
    const bool spreads = params.settled && params.tokens * blocks(rows) * parts <= kSpreadBlocks;
    return {kernel_of(a.part.format, kind == RowKind::kAny     ? Variant::kRows
                                     : kind == RowKind::kWhole ? Variant::kWholeRows
                                                               : Variant::kPlainRows),
            dim3(parts, blocks(rows), static_cast<unsigned>(params.tokens)), row_warps * 32,
            spreads ? kSpread : 0};
  }
  const std::int64_t units = (params.tokens + kWindow - 1) / kWindow << (a.segment_log2 - 3);
  const unsigned groups = meets ? 1 : blocks(kGroupHeads);
  const KvFormat& f = a.part.format;
  const bool shares = kind == RowKind::kPlain && !meets && !wide && f.dynamic_scale() &&
                      f.asymmetric == (f.dtype == DType::kInt4);  // kNamed
  const bool lone = shares && units * groups * parts >= kLoneWarps;
  const int warps = lone ? 1 : std::min(params.kv_heads, meets ? kMeetWarps : kAppendWarps);
  return {kernel_of(a.part.format, wide                      ? Variant::kWideWindows
                                   : kind == RowKind::kPlain ? Variant::kPlainWindows
                                                             : Variant::kWindows),
          dim3(static_cast<unsigned>(units), groups, parts), warps * 32, 0};
}

}  // namespace

int launch_append(const AppendParams& params, void* stream) {
  if (params.tokens == 0) return cudaSuccess;
  const auto kind_of = [&](const AppendPart& a) {
    return is_plain(params, a) ? RowKind::kPlain : is_whole(params, a) ? RowKind::kWhole : RowKind::kAny;
  };
  const auto launch = [&](int first, RowKind kind, unsigned parts) {
    const AppendLaunch l = launch_of(params, params.parts[first], kind, parts);
    const void* arguments[] = {&params, &first};
    return launch_early(l.kernel, l.grid, dim3(static_cast<unsigned>(l.threads)), arguments, stream,
                        l.shared_bytes);
  };
  const AppendPart &k = params.parts[0], &v = params.parts[1];
  const RowKind of_k = kind_of(k), of_v = kind_of(v);
  if (kernel_of(k.part.format, Variant::kWindows) == kernel_of(v.part.format, Variant::kWindows) &&
      k.part.dim == v.part.dim) {
    return launch(0, std::min(of_k, of_v), 2);
  }
  const cudaError_t status = launch(0, of_k, 1);
  return status != cudaSuccess ? status : launch(1, of_v, 1);
}

}  // namespace halftone::cuda
