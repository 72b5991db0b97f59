// Quantise and write few new tokens: a CTA has K or V of one token, a lane a chunk of one row. As many rows
// as the device has lanes are under way at once, and the code is short: at these sizes an append is as fast
// as its chain of dependent loads and the fetches of its instructions.
#pragma once

#include "cuda/append/windows.h"

namespace halftone::cuda {

/// K or V of token `token` and KV head `head`: a lane's chunk, or both of a wide row, each segment of lanes a
/// row of its own. The lanes of a warp take part together. `slot_of()`: the row's slot or -1, asked for while
/// the row is loaded.
template <class Traits, class SlotOf>
__device__ __forceinline__ void append_row(const AppendParams& p, const AppendPart& part, const RowLane& lane,
                                           std::int64_t token, int head, const SlotOf& slot_of) {
  static_assert(Traits::kScale != AppendScale::kToken);
  constexpr int kHalves = is_wide(Traits::kDim) ? 2 : 1;
  Rows<Traits::kType, 1, Traits::kKind, Traits::kDim, kHalves> rows;
  rows.first = token;
  const auto behind = [&](int of) { return of + 1 < p.kv_heads ? of + 1 : 0; };
  int of = head;  // of heads that share the scale one after the other, the row's own last
  if constexpr (Traits::kScale == AppendScale::kEither) {
    if (part.part.format.granularity == Granularity::kToken) of = behind(head);
  }
  rows.load(p, part, lane, of);
  const float2 given = Traits::given(part, min(head, p.kv_heads - 1));
  const std::int64_t slot = slot_of();
  const bool wanted = slot >= 0;
  if (!__any_sync(~0u, wanted)) return;
  codec::Params params[kHalves];
  if constexpr (!Traits::kComputes) {
    rows.transform(p, part, lane, head, wanted ? 1 : 0);
    if (Traits::kPlain && Traits::kQuantised) rows.check(p, part, wanted ? 1 : 0);
    params[0] = codec::static_params(given.x, given.y);
    if (Traits::kQuantised) check_given(p, params[0], lane.live && wanted);
    if (kHalves == 2) params[kHalves - 1] = params[0];
  } else {
    codec::Range ranges[kHalves];
    if constexpr (Traits::kScale == AppendScale::kEither) {
      rows.exist = wanted ? 1 : 0;
      if (!Traits::kAsymmetric) {
#pragma unroll
        for (codec::Range& r : ranges) r = {0.0f, 0.0f};  // of magnitudes
      }
#pragma unroll 1
      for (;;) {
        rows.transform(p, part, lane, of, wanted ? 1 : 0);
        codec::Range own[kHalves];
        rows.template extents<!Traits::kAsymmetric, Traits::kPlain>(p, part, wanted ? 1 : 0, own);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) ranges[h].include(own[h]);
        if (of == head) break;
        of = behind(of);
        rows.load_head(part, lane, of);
      }
    } else {
      rows.transform(p, part, lane, head, wanted ? 1 : 0);
      rows.template extents<!Traits::kAsymmetric, Traits::kPlain>(p, part, wanted ? 1 : 0, ranges);
    }
    group_extents<!Traits::kAsymmetric, kHalves>(lane, Traits::group_log2(part), ranges);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) params[h] = Traits::params_of(part, ranges[h]);
  }
#pragma unroll 1
  for (int h = 0; h < kHalves; ++h) {
    typename Traits::Codes codes;
    rows.encode(params[0], 0, codes);
    const bool writes = lane.live && wanted;
    if (!Traits::kTogether && !writes) return;
    const int place = static_cast<int>(slot % kTileTokens), chunk = rows.chunk_of(lane, h);
    std::uint8_t* at = tile_of(p, slot) + head * p.head_bytes;
    const typename Traits::Store store(part, part.part.which, chunk);
    if constexpr (Traits::kTogether) {
      store.token_together(codes, place, at, writes);
      if (!writes) return;
    } else {
      store.token(codes, place, at);
    }
    if (Traits::kComputes && (chunk & ((1 << Traits::group_log2(part)) - 1)) == 0) {
      typename Traits::Params(part, chunk).token(params[0], place, at);
    }
    if constexpr (kHalves == 2) {
      rows.take_half();
      params[0] = params[1];
    }
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
