#include "cuda/attention/pages.h"
#include "cuda/device/chunk.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.h"
#include "cuda/latent/copied/copy.h"

namespace halftone::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kEach = 4;  // adjacent places of a warp, whose records are on their way together

/// Lanes have 16 adjacent latent dims of a record, those of its first eight 8 rotary dims, too.
template <LatentCodes kCodes>
struct RecordCopier {
  using Record = LatentRecord<kCodes>;
  static constexpr DType kType = kCodes == LatentCodes::kFp8    ? DType::kFloat8E4M3
                                 : kCodes == LatentCodes::kInt8 ? DType::kInt8
                                                                : DType::kInt4;
  static constexpr bool kMins = kCodes == LatentCodes::kInt4;
  static constexpr int kDims = 16, kWords = kDims * Record::kBits / 32, kChunkWords = kWords / 2;
  static_assert(Record::kLatent == 32 * kDims && Record::kGroupDims % kDims == 0);

  const CopyListedParams& p;
  int lane;

  struct Raw {
    std::uint32_t words[kWords];
    codec::Params params;
    uint4 rope;
  };

  __device__ const std::uint8_t* record(std::int32_t slot) const {
    const CacheView& c = p.cache;
    const std::int32_t within = slot & ((1 << c.page_log2) - 1);
    return c.pages + (slot >> c.page_log2) * c.page_stride + within * std::int64_t{Record::kRecordBytes};
  }
  __device__ Raw load(const std::uint8_t* from) const {
    Raw raw;
    const std::uint8_t* const codes = from + lane * (4 * kWords);
    if constexpr (kWords == 4) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(codes));
      raw.words[0] = x.x, raw.words[1] = x.y, raw.words[2] = x.z, raw.words[3] = x.w;
    } else {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(codes));
      raw.words[0] = x.x, raw.words[1] = x.y;
    }
    const int group = lane * kDims / Record::kGroupDims;
    const std::uint8_t* const scales = from + Record::kScalesAt;
    if constexpr (kCodes == LatentCodes::kFp8) {
      raw.params.scale = __ldg(reinterpret_cast<const float*>(scales) + group);
    } else {
      const auto value = [&](int i) { return load_value(DType::kFloat16, scales, i); };
      raw.params.scale = value(group);
      if constexpr (kMins) raw.params.min = value(Record::kGroups + group);
    }
    if (lane < 8) raw.rope = __ldg(reinterpret_cast<const uint4*>(from + Record::kRopeAt) + lane);
    return raw;
  }
  __device__ void store(const Raw& raw, std::uint8_t* to) const {
    uint4* const out = reinterpret_cast<uint4*>(to) + 2 * lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[8];
      decode_codes<kType, kMins>(raw.words + half * kChunkWords, raw.params, x);
      out[half] = {pack_bf16x2(x[0], x[1]), pack_bf16x2(x[2], x[3]), pack_bf16x2(x[4], x[5]),
                   pack_bf16x2(x[6], x[7])};
    }
    if (lane < 8) reinterpret_cast<uint4*>(to + 2 * Record::kLatent)[lane] = raw.rope;
  }

  /// Places `first` and on of a query.
  __device__ void run(std::int64_t query, int first) const {
    const int place = first + lane;
    std::int32_t own = -1;  // of the lanes below kEach; asked for before it is known whether the place counts
    if (lane < kEach && place < p.top_k && query < p.q_tokens) {
      own = __ldg(p.list.indices + query * p.list.stride + place);
    }
    const int count = min(p.counts[query], p.top_k);
    if (first >= count) return;
    const bool counts = lane < kEach && place < count;
    if (!counts) own = -1;
    if (own >= 0 && static_cast<std::uint32_t>(own) >= slot_end(p.cache)) {
      if (p.status != nullptr) atomicOr(p.status, kStatusBadPage);
      own = -1;
    }
    const std::int64_t base = query * p.top_k;
    if (counts) p.places[base + place] = own < 0 ? -1 : static_cast<std::int32_t>(base + place);
    Raw raw[kEach];
    std::int32_t slots[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      slots[i] = __shfl_sync(~0u, own, i);
      if (slots[i] >= 0) raw[i] = load(record(slots[i]));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (slots[i] >= 0) store(raw[i], p.records + (base + first + i) * kCopiedRecordBytes);
    }
  }
};

template <LatentCodes kCodes>
__global__ void __launch_bounds__(32 * kWarps) copy_listed(const __grid_constant__ CopyListedParams p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  RecordCopier<kCodes>{p, lane}.run(blockIdx.y, (static_cast<int>(blockIdx.x) * kWarps + warp) * kEach);
}

const void* kernel_of(LatentCodes codes) {
  switch (codes) {
    case LatentCodes::kInt8:
      return reinterpret_cast<const void*>(&copy_listed<LatentCodes::kInt8>);
    case LatentCodes::kInt4:
      return reinterpret_cast<const void*>(&copy_listed<LatentCodes::kInt4>);
    default:
      return reinterpret_cast<const void*>(&copy_listed<LatentCodes::kFp8>);
  }
}

}  // namespace

int launch_copy_listed(LatentCodes codes, const CopyListedParams& p, void* stream) {
  if (p.queries == 0) return cudaSuccess;
  constexpr int kPlaces = kWarps * kEach;
  const dim3 grid(static_cast<unsigned>((p.top_k + kPlaces - 1) / kPlaces), static_cast<unsigned>(p.queries));
  const void* argument = &p;
  return launch_early(kernel_of(codes), grid, dim3(32 * kWarps), &argument, stream);
}

}  // namespace halftone::cuda
