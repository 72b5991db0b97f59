// The end of an item of the kernels that hold O in two warpgroups, 256 dims of all rows each: O and the LSE
// go to the caller's tensors or, of a part of a cut unit, to its slot. With splits at absolute positions the
// last part to arrive merges all; else the parts share them, in pieces (SharedMerge), and none has to wait
// for another.
#pragma once

#include "cuda/attention/finish.h"
#include "cuda/attention/shared_merge.h"
#include "cuda/device/reduce.h"
#include "cuda/device/wgmma.h"
#include "cuda/latent/wide/merge.h"

namespace halftone::cuda::wide {

/// Traits: `Shared`, which has `queue`, `item_index` and `merges`; `kFirstThread` of both warpgroups and
/// `kBarrier` among them; `kNatural`: whether columns hold dims as they are, or as column_of() says.
template <class Traits>
struct OutputEnd {
  static constexpr int kHalf = 64;  // registers of 128 dims of a lane
  const AttentionParams& params;
  typename Traits::Shared& s;
  int rank;
  const AttentionParams& p = params;
  const Slots<kLatentDims> slots{p};
  unsigned thread;  // of both warpgroups; read anew now and then, to free its register
  float o[2][kHalf];

  __device__ void locate() { thread = thread_index() - Traits::kFirstThread; }
  __device__ int half() const { return int(thread / 128); }  // of O's dims
  __device__ int warp() const { return int(thread / 32 % 4); }
  __device__ int lane() const { return int(thread % 32); }

  __device__ const DeviceItem& item(int index) const {
    return s.queue.items[index % unsigned{Queue::kCapacity}];
  }
  __device__ int row(int r) const { return warp() * 16 + lane() / 4 + 8 * r; }

  __device__ void release(std::uint64_t& barrier) const {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&barrier));
  }
  /// Among both warpgroups.
  __device__ static void output_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(Traits::kBarrier), "n"(256) : "memory");
  }

  /// What row r's 4 bytes of 16-bit elements, or 8 of fp32, hold: dims from this one on, of O's registers
  /// o[i][4 j + 2 r + 0..1].
  __device__ int dim(int i, int j) const {
    return 256 * half() + 128 * i + (Traits::kNatural ? 8 * j : dim_of(j / 8, j % 8)) + lane() % 4 * 2;
  }
  /// Which j of dim() the 8 dims from 8 e on are, of the 32 from 16 chunk on.
  __device__ static constexpr int eight_of(int chunk, int e) {
    return Traits::kNatural ? 2 * chunk + e : e % 2 * 8 + chunk + e / 2;
  }
  /// A row to the caller's tensor.
  __device__ void write(int r, std::int64_t at, float scale, bool keep) const {
    if (p.out_type == DType::kFloat32) {
      float* to = static_cast<float*>(p.out) + at;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (!keep) continue;
          *reinterpret_cast<float2*>(to + dim(i, j)) = {o[i][4 * j + 2 * r] * scale,
                                                        o[i][4 * j + 2 * r + 1] * scale};
        }
      }
      return;
    }
    write_narrow(r, static_cast<std::uint16_t*>(p.out) + at, scale, keep, p.out_type == DType::kBFloat16);
  }
  /// A row in bf16, or f16. The lanes of a row have 4 bytes of each 16: they trade them so that each stores
  /// 16 of 64 adjacent bytes.
  __device__ void write_narrow(int r, std::uint16_t* row, float scale, bool keep, bool bf16) const {
    std::uint16_t* const to = row + 256 * half() + lane() % 4 * 8;
    const bool aligned = (reinterpret_cast<std::uintptr_t>(to) & 15) == 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < 8; chunk += 2) {
        std::uint32_t w[4];  // of the 8 dims from 8 e on
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* x = o[i] + 4 * eight_of(chunk, e) + 2 * r;
          const float a = x[0] * scale, b = x[1] * scale;
          w[e] = bf16 ? pack_bf16x2(a, b) : pack_f16x2(a, b);
        }
        pin(w);  // one after the other: registers are dear
        transpose_quad(w, lane());
        if (!keep) continue;
        std::uint16_t* out = to + 128 * i + 16 * chunk;
        store_sixteen(out, w, aligned);
      }
    }
  }

  /// Merges what the item's slot holds before the rows.
  __device__ void fold(int slot, RowState (&state)[2]) {
    float2 before[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      locate();
      asm volatile("" : "+r"(slot));  // computed anew for each row: registers are dear
      const std::int64_t at = slots.at(slot, kRows * rank + row(r));
      before[r] = slots.states()[at];
      const float merged = fmaxf(before[r].x, state[r].max);
      const float w = weight_log2(before[r].x, merged), own = weight_log2(state[r].max, merged);
      state[r].sum = fmaf(state[r].sum, own, before[r].y * w);
      state[r].max = merged;
      const float* values = p.partial_out + at * kLatentDims;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 x = *reinterpret_cast<const float2*>(values + dim(i, j));
          float(&y)[2] = reinterpret_cast<float(&)[2]>(o[i][4 * j + 2 * r]);
          y[0] = fmaf(y[0], own, x.x * w);
          y[1] = fmaf(y[1], own, x.y * w);
          pin(y);  // few at a time: registers are dear
        }
        if (Traits::kNatural) __syncwarp();  // likewise
      }
    }
    output_barrier();  // all have read the slot's states
  }
  __device__ void store_part(int slot, int rows, const RowState (&state)[2]) {
    const PartSlots parts{slots};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      locate();
      if (warp() * 16 + 8 * r >= rows) break;
      const bool empty = state[r].max == kMinus || state[r].sum == 0.0f;
      const float mean = empty ? 0.0f : 1.0f / state[r].sum;
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < kHalf; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          most = fmaxf(most, fmaxf(fabsf(o[0][i + 2 * r + e]), fabsf(o[1][i + 2 * r + e])));
        }
      }
      most = largest_of_lanes<1, 4>(most);
      const int power = power_for(most * mean);
      const float scale = mean * power_of_two(-power);
      asm volatile("" : "+r"(slot));  // widened here, not before: registers are dear
      uint4* const values =
          parts.piece(slot, kRows * rank, (2 * warp() + r) * PartSlots::kLanePieces + 8 * half(), lane());
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        std::uint32_t w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* x = o[i / 4] + 4 * eight_of(i % 4 * 2, e) + 2 * r;
          w[e] = pack_f16x2(x[0] * scale, x[1] * scale);
        }
        values[32 * i] = {w[0], w[1], w[2], w[3]};
        __syncwarp();  // one after the other: registers are dear
      }
      if (lane() % 4 != 0) continue;
      PartState* const to = parts.state(slot, kRows * rank + row(r));
      reinterpret_cast<std::int16_t*>(&to->powers)[half()] = static_cast<std::int16_t>(power);
      if (half() == 0) to->lse = empty ? kMinus : state[r].max + log2f(state[r].sum);
    }
  }
  /// Of a split at an absolute position, in fp32.
  __device__ void store_split(int slot, const RowState (&state)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t at = slots.at(slot, kRows * rank + row(r));
      float* values = p.partial_out + at * kLatentDims;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          *reinterpret_cast<float2*>(values + dim(i, j)) = {o[i][4 * j + 2 * r], o[i][4 * j + 2 * r + 1]};
        }
      }
      if (half() == 0 && lane() % 4 == 0) slots.states()[at] = {state[r].max, state[r].sum};
    }
  }

  /// Of sums relative to `state`.
  __device__ void finish(const DeviceItem& done, RowState (&state)[2]) {
    const planning::WorkItem& work = done.work;
    if (work.fold) fold(work.partial, state);
    locate();
    if (work.finish) {
      const int rows = own_rows(work, rank);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool keep = row(r) < rows;
        const RowPlace place = place_of(p, done, kRows * rank + (keep ? row(r) : 0));
        const RowEnd final_state = row_end(p, place.head, state[r].max, state[r].sum, keep);
        write(r, out_element(p, place), final_state.scale, keep);
        if (half() == 0 && keep && lane() % 4 == 0) write_lse(p, place, final_state.lse);
      }
      return;
    }
    if (p.schedule.params.absolute) {
      store_split(work.partial, state);
    } else {
      store_part(work.partial, own_rows(work, rank), state);
    }
    if (done.first_slot >= 0) merge_parts(done);
  }

  /// The end of a part of a cut unit.
  __device__ void merge_parts(const DeviceItem& cut) {
    locate();
    int own = 2 * rank;
    asm volatile("" : "+r"(own));  // not kept from the start: registers are dear
    std::int32_t* const counters = p.arrivals + std::int64_t{cut.first_slot} * kArrivalCounters + own;
    const bool absolute = p.schedule.params.absolute;
    const int owners = absolute ? 1 : SharedMerge::owners(cut.parts);
    output_barrier();  // the slot is stored
    if (thread == 0) {
      if (absolute) {
        const bool complete = count_arrival(counters) == cut.arrivals - 1;
        if (complete) *counters = 0;
        s.merges = complete;
      } else {
        s.merges = SharedMerge::arrive(counters, cut.work.partial - cut.first_slot, cut.parts, [this] {
          return !s.queue.more && s.queue.count == s.item_index[0] + 1;
        });
      }
    }
    output_barrier();
    if (absolute) {
      if (s.merges != 0) merge_splits(cut);
      return;
    }
    const int pieces = (own_rows(cut.work, rank) + 7) / 8 * PartSlots::kLanePieces;
#pragma unroll 1
    for (std::uint32_t left = s.merges; left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      merge_pieces(cut, SharedMerge::first_piece(pieces, owner, owners),
                   SharedMerge::first_piece(pieces, owner + 1, owners));
    }
    output_barrier();  // all have read what they merge
    if (thread == 0) SharedMerge::leave(counters, cut.parts);
  }
  /// A warp one at a time.
  __device__ void merge_pieces(const DeviceItem& cut, int first, int last) const {
    const PartSlots parts{slots};
    const int rows = own_rows(cut.work, rank);
#pragma unroll 1
    for (int index = first + half() * 4 + warp(); index < last; index += 8) {
      const int row = index / PartSlots::kLanePieces * 8 + lane() / 4,
                within = index % PartSlots::kLanePieces;
      MergedPiece piece;
      piece.merge(parts, cut.first_slot, cut.parts, kRows * rank + row, within / 8,
                  parts.piece(cut.first_slot, kRows * rank, index, lane()), lane());
      write_piece(piece, cut, min(row, rows - 1), within, row < rows);
    }
  }
  /// To the caller's tensors. `within`: of the row's pieces; by all lanes.
  __device__ void write_piece(const MergedPiece& piece, const DeviceItem& cut, int row, int within,
                              bool keep) const {
    const RowPlace place = place_of(p, cut, kRows * rank + row);
    const RowEnd end = row_end(p, place.head, piece.max, piece.sum, true);
    const std::int64_t at = out_element(p, place) + 32 * within;
    if (p.out_type == DType::kFloat32) {
      float* const to = static_cast<float*>(p.out) + at + lane() % 4 * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (keep) {
          *reinterpret_cast<float2*>(to + 8 * e) = {piece.x[2 * e] * end.scale,
                                                    piece.x[2 * e + 1] * end.scale};
        }
      }
    } else {
      std::uint32_t w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        w[e] = pack_16bit(p.out_type, piece.x[2 * e] * end.scale, piece.x[2 * e + 1] * end.scale);
      }
      transpose_quad(w, lane());
      std::uint16_t* const to = static_cast<std::uint16_t*>(p.out) + at + lane() % 4 * 8;
      if (keep) store_sixteen(to, w, (reinterpret_cast<std::uintptr_t>(to) & 15) == 0);
    }
    if (keep && within == 0 && lane() % 4 == 0) write_lse(p, place, end.lse);
  }
  /// All rows, left to right.
  __device__ void merge_splits(const DeviceItem& cut) const {
    const int rows = own_rows(cut.work, rank);
#pragma unroll 1
    for (int i = half() * 4 + warp(); i < rows; i += 8) {
      const int row = kRows * rank + i;
      Row<kLatentDims, 32> state;
      state.template add<4>(slots.parts(cut.first_slot, 1, cut.parts, row), lane());
      if (p.out_type == DType::kFloat32) {
        write_row<kLatentDims, RowStore::kAnything>(p, place_of(p, cut, row), state, lane(), true);
      } else {
        write_row<kLatentDims, RowStore::kHalves>(p, place_of(p, cut, row), state, lane(), true);
      }
    }
  }
};

}  // namespace halftone::cuda::wide
