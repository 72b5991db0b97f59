// The queries of an item: by tensor copies, or row by row.
#pragma once

#include "cuda/attention/rows.h"
#include "cuda/device/tma.h"
#include "cuda/latent/bf16/traits.h"

namespace halftone::cuda::bf16 {

/// The rows of items, by a warp or several.
struct QueryLoader {
  const LatentBf16Params& params;
  Shared& s;
  int rank, lane;
  int warp = 0, warps = 1;  // of those that bring an item's rows, each of which arrives at q_full
  const AttentionParams& p = params.attention;

  /// By tensor copies, rows of other requests among them, whose results are not written.
  __device__ void copy_boxes(const DeviceItem& item) const {
    const int group = p.schedule.params.group, row = item.work.row_begin + kRows * rank;
    const std::uint32_t full = shared_address(&s.q_full);
    if (lane == 0) barrier_expect_bytes(full, kAllColumns * kColumnBytes);
    __syncwarp();
    if (lane < kAllColumns) {
      tensor_load(shared_address(s.q[lane]), params.q, full, lane * 64, row % group,
                  item.first_query + row / group);
    }
  }
  /// Row by row; those that the item lacks become zeros.
  __device__ void copy_rows(const DeviceItem& item) const {
    constexpr int kPieces = kAllColumns * 8;  // of a row, 16 bytes each
    const int rows = own_rows(item.work, rank);
#pragma unroll 1
    for (int i = 32 * warp + lane; i < kRows * kPieces; i += 32 * warps) {
      const int row = i / kPieces, piece = i % kPieces;
      const bool has = row < rows;
      const RowPlace place = place_of(p, item, has ? kRows * rank + row : 0);
      const auto* const from = static_cast<const std::uint16_t*>(p.q) +
                               (has ? place.token * p.q_token_stride + place.head * p.q_head_stride : 0) +
                               8 * piece;
      std::uint8_t* const to = s.q[piece / 8] + place_in_column(row, piece % 8);
      if (p.q_aligned) {
        copy_async(shared_address(to), from, has ? 16 : 0);
      } else {
        *reinterpret_cast<uint4*>(to) = has ? load_eight(from, false) : uint4{};
      }
    }
    copy_async_wait();
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.q_full));
  }

  /// Of item `index`, once those of the one before it are not needed any more.
  __device__ void bring(int index) const {
    const DeviceItem& item = s.queue.items[index % unsigned{Queue::kCapacity}];
    barrier_wait(shared_address(&s.q_empty), index % 2 ^ 1);
    if (!params.q_boxes || own_rows(item.work, rank) == 0) {
      copy_rows(item);
    } else if (warp == warps - 1) {
      copy_boxes(item);
    } else if (lane == 0) {
      barrier_arrive(shared_address(&s.q_full));
    }
  }
  __device__ void run() const {
#pragma unroll 1
    for (int index = 0; s.queue.has(index); ++index) bring(index);
  }
};

}  // namespace halftone::cuda::bf16
