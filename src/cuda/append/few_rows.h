// Quantise and write few new tokens: a CTA has K or V of one token, a lane a chunk of one row. As many rows
// as the device has lanes are under way at once, and the code is short: at these sizes an append is as fast
// as its chain of dependent loads and the fetches of its instructions.
#pragma once

#include "cuda/append/windows.h"

namespace halftone::cuda {

/// K or V of token `token` and KV head `head`: a lane's chunk, each segment of lanes a row of its own. The
/// lanes of a warp take part together. `slot_of()`: the row's slot or -1, asked for while the row is loaded.
template <class Traits, class SlotOf>
__device__ __forceinline__ void append_row(const AppendParams& p, const AppendPart& part, const RowLane& lane,
                                           std::int64_t token, int head, const SlotOf& slot_of) {
  static_assert(Traits::kScale != AppendScale::kToken);
  Rows<Traits::kType, 1, Traits::kKind, Traits::kDim> rows;
  rows.first = token;
  rows.load(p, part, lane, head);
  const float2 given = Traits::given(part, min(head, p.kv_heads - 1));
  const std::int64_t slot = slot_of();
  const bool wanted = slot >= 0;
  if (!__any_sync(~0u, wanted)) return;
  rows.transform(p, part, lane, head, wanted ? 1 : 0);
  codec::Params params;
  if constexpr (Traits::kScale == AppendScale::kGiven) {
    if (Traits::kPlain && Traits::kQuantised) rows.check(p, part, wanted ? 1 : 0);
    params = codec::static_params(given.x, given.y);
    if (Traits::kQuantised) check_given(p, params, lane.live && wanted);
  } else {
    codec::Range range[1];
    rows.template extents<!Traits::kAsymmetric, Traits::kPlain>(p, part, wanted ? 1 : 0, range);
    group_extents<!Traits::kAsymmetric>(lane, Traits::group_log2(part), range);
    params = Traits::params_of(part, range[0]);
  }
  typename Traits::Codes codes;
  rows.encode(params, 0, codes);
  const bool writes = lane.live && wanted;
  if (!Traits::kTogether && !writes) return;
  const int place = static_cast<int>(slot % kTileTokens);
  std::uint8_t* at = tile_of(p, slot) + head * p.head_bytes;
  const typename Traits::Store store(part, part.part.which, lane.chunk);
  if constexpr (Traits::kTogether) {
    store.token_together(codes, place, at, writes);
    if (!writes) return;
  } else {
    store.token(codes, place, at);
  }
  if (Traits::kScale == AppendScale::kRow && (lane.chunk & ((1 << Traits::group_log2(part)) - 1)) == 0) {
    typename Traits::Params(part, lane.chunk).token(params, place, at);
  }
}

/// blockIdx.y: group of KV heads, blockIdx.z: token. Begins the append, too.
template <class Traits>
__device__ __forceinline__ void append_rows(const AppendParams& p, const AppendPart& part) {
  RowLane lane(part);
  const int head =
      static_cast<int>(blockIdx.y * (blockDim.x >> part.segment_log2) + (threadIdx.x >> part.segment_log2));
  lane.live &= head < p.kv_heads;
  const auto look_up = [&] { return slot_of<warp_request_of>(p, blockIdx.z); };
  std::int64_t known = -1;
  if (p.next_knows) let_next_kernel_start();
  if (p.settled) known = look_up();
  begin_append(p);
  append_row<Traits>(p, part, lane, blockIdx.z, head, [&] { return p.settled ? known : look_up(); });
}

}  // namespace halftone::cuda
