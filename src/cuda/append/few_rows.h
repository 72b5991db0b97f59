// Quantise and write few new tokens: a CTA has K or V of one token, a lane a chunk of one row. As many rows
// as the device has lanes are under way at once, and the code is short: at these sizes an append is as fast
// as its chain of dependent loads and the fetches of its instructions.
#pragma once

#include "cuda/append/windows.h"

namespace halftone::cuda {

/// blockIdx.x: token, blockIdx.y: group of KV heads.
template <class Traits>
__device__ __forceinline__ void append_rows(const AppendParams& p, const AppendPart& part) {
  static_assert(Traits::kScale != AppendScale::kToken);
  RowLane lane(part);
  const int head =
      static_cast<int>(blockIdx.y * (blockDim.x >> part.segment_log2) + (threadIdx.x >> part.segment_log2));
  lane.live &= head < p.kv_heads;
  Rows<1, Traits::kPlain> rows;
  rows.first = blockIdx.x;
  rows.load(p, part, lane, head);
  const float2 given = Traits::given(part, min(head, p.kv_heads - 1));
  const std::int64_t slot = slot_of<warp_request_of>(p, blockIdx.x);
  if (slot < 0) return;
  rows.transform(p, part, lane, head, 1);
  codec::Params params;
  if constexpr (Traits::kScale == AppendScale::kGiven) {
    params = codec::static_params(given.x, given.y);
    if (Traits::kQuantised) check_given(p, params, lane.live);
  } else {
    codec::Range range[1];
    rows.template extents<!Traits::kAsymmetric, false>(p, part, 1, range);
    group_extents<!Traits::kAsymmetric>(lane, part.group_log2, range);
    params = Traits::params_of(part, range[0]);
  }
  typename Traits::Codes codes;
  codes.encode(params, rows.x[0]);
  if (!lane.live) return;
  const int place = static_cast<int>(slot % kTileTokens);
  std::uint8_t* at = tile_of(p, slot) + head * p.head_bytes;
  typename Traits::Store(part, part.part.which, lane.chunk).token(codes, place, at);
  if (Traits::kScale == AppendScale::kRow && (lane.chunk & ((1 << part.group_log2) - 1)) == 0) {
    typename Traits::Params(part, lane.chunk).token(params, place, at);
  }
}

}  // namespace halftone::cuda
