// The end of a warpgroup's rows: O and the LSE to the caller's tensors, of a cut unit some rows of all parts.
#pragma once

#include "cuda/attention/output.h"
#include "cuda/prefill/parts.h"

namespace halftone::cuda {

/// Rotates a row that lies over four lanes as wgmma leaves it, dims 8 j + 2 lane + e.
template <int kDim, int kO>
__device__ inline void rotate_fragment(float (&o)[kO], int r, int lane) {
  constexpr int kBlock = hadamard::block_size(kDim);
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    const float a = o[4 * j + 2 * r], b = o[4 * j + 2 * r + 1];
    o[4 * j + 2 * r] = a + b, o[4 * j + 2 * r + 1] = a - b;
  }
#pragma unroll
  for (int h = 1; h < 4; h *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      float& x = o[i / 2 * 4 + 2 * r + i % 2];
      const float other = __shfl_xor_sync(~0u, x, h);
      x = lane & h ? other - x : x + other;
    }
  }
#pragma unroll
  for (int h = 8; h < kBlock; h *= 2) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {
      if (i / 2 * 8 & h) continue;
      float &a = o[i / 2 * 4 + 2 * r + i % 2], &b = o[(i / 2 + h / 8) * 4 + 2 * r + i % 2];
      const float sum = a + b;
      b = a - b, a = sum;
    }
  }
}

/// Without a branch, which the compiler would put around each store.
__device__ inline void store_two_if(bool condition, void* to, std::uint32_t a, std::uint32_t b) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.b32 [%1], {%2, %3}; }" ::"r"(
                   static_cast<int>(condition)),
               "l"(to), "r"(a), "r"(b)
               : "memory");
}

template <PrefillConfig C>
struct RowsEnd {
  using Traits = PrefillTraits<C>;
  static constexpr int kDims = Consumer<C>::kValueDim;
  const PrefillParams& params;
  Consumer<C>& c;
  const typename Traits::Item& whole;
  int index;  // of the item

  const DeviceItem& item = whole.item;

  /// Of O, of the warpgroup's.
  __device__ int first_dim() const { return c.share() * kDims; }
  /// place_of() without its division.
  __device__ RowPlace place(int row) const {
    const int query = whole.position[row] - item.keys + item.queries, group = c.p.schedule.params.group;
    return {std::int64_t{item.first_query} + query,
            item.work.kv_head * group + item.work.row_begin + row - query * group, whole.position[row], 0.0f};
  }
  __device__ float value_scale() const { return Traits::kStaged ? whole.value_scale : 1.0f; }
  /// What O of rows g and g + 8 is multiplied by; writes the LSE. As row_end(), whose exact division and
  /// logarithm cost short prompts some percent.
  __device__ void finish_rows(float (&scale)[2]) const {
    const AttentionParams& p = c.p;
    const int rows = item.work.row_end - item.work.row_begin;
    float max[2], sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = c.first_row() + 8 * r;
      max[r] = c.softmax.empty(r) ? kMinus : c.softmax.offset[r];
      sum[r] = c.softmax.sum[r];
      scale[r] = 1.0f;
      if constexpr (Traits::kStaged) {
        if (p.channels.offset != nullptr) {
          const float offset = offset_logit<4>(p, place(row), c.lane(), row < rows);
          if (max[r] != kMinus) max[r] += offset;  // of a row without keys it may be NaN
        }
      }
      if (p.sinks != nullptr && row < rows && sum[r] != 0.0f) {
        const float sink = p.sinks[place(row).head] * kLog2e, merged = fmaxf(max[r], sink);
        scale[r] = exp2_approx(max[r] - merged);
        sum[r] = sum[r] * scale[r] + exp2_approx(sink - merged);
        max[r] = merged;
      }
      scale[r] *= sum[r] == 0.0f ? 0.0f : reciprocal_approx(sum[r]) * value_scale();
    }
    if (p.lse != nullptr && c.share() == 0 && c.lane() % 4 < 2) {  // the first two lanes of four a row each
      const int r = c.lane() % 2, row = c.first_row() + 8 * r;
      const float own = r == 0 ? sum[0] : sum[1];
      const float lse = ((r == 0 ? max[0] : max[1]) + log2_approx(own)) * kLn2;
      if (row < rows) write_lse(p, place(row), own == 0.0f ? kMinus : lse);
    }
    // Else V is in the caller's basis: keys_of(), prefill_variant() and staging see to it.
    if constexpr (C.shares == 1) {
      if (!p.rotate_v) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rotate_fragment<C.value_dim>(c.o, r, c.lane());
        scale[r] *= hadamard::factor(hadamard::block_size(C.value_dim));
      }
    }
  }

  /// Divides, rotates back and writes.
  __device__ void write() const {
    const AttentionParams& p = c.p;
    const int rows = item.work.row_end - item.work.row_begin;
    float scale[2];
    finish_rows(scale);
    if (Traits::kStagesOutput && params.out_boxes && 64 * (c.group() + 1) <= rows) {
      if (p.out_type == DType::kBFloat16) {
        write_box<DType::kBFloat16>(scale);
      } else {
        write_box<DType::kFloat16>(scale);
      }
    } else {
      write_rows(scale);
    }
  }
  __device__ void write_rows(const float (&scale)[2]) const {
    const AttentionParams& p = c.p;
    const int rows = item.work.row_end - item.work.row_begin;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = c.first_row() + 8 * r;
      const bool keep = row < rows;
      const std::int64_t out = out_element(p, place(keep ? row : 0)) + first_dim();
      const bool bf16 = p.out_type == DType::kBFloat16;
      auto* const halves = static_cast<std::uint16_t*>(p.out) + out;
      if (p.out_type == DType::kFloat32) {
        float* to = static_cast<float*>(p.out) + out + thread_index() % 4 * 2;
        asm volatile("" : "+l"(to));  // as in write_16bit()
#pragma unroll
        for (int j = 0; j < kDims / 8; ++j) {
          const float* x = c.o + 4 * j + 2 * r;
          store_two_if(keep, to + 8 * j, __float_as_uint(x[0] * scale[r]), __float_as_uint(x[1] * scale[r]));
        }
      } else if constexpr (!Traits::kE4m3) {
        write_16bit(halves, r, scale[r], keep,
                    [bf16](float a, float b) { return bf16 ? pack_bf16x2(a, b) : pack_f16x2(a, b); });
      } else if (bf16) {  // the code twice: short calls take 2% less
        write_16bit(halves, r, scale[r], keep, [](float a, float b) { return pack_bf16x2(a, b); });
      } else {
        write_16bit(halves, r, scale[r], keep, [](float a, float b) { return pack_f16x2(a, b); });
      }
    }
  }

  /// All 64 rows by a tensor copy from where the queries were, which goes on beside the next item. A warp
  /// writes where only its own queries lay.
  template <DType kType>
  __device__ void write_box(const float (&scale)[2]) const {
    const auto pack = [](float a, float b) { return pack_16bit(kType, a, b); };
    const int group = c.group(), lane = c.lane();
    std::uint8_t* const out = c.s.q[index % Traits::kQueryBuffers][group];  // the queries are not needed now
    constexpr int kRow = Traits::kRowBytes, kPieces = Traits::Place::kPieces;
    const std::uint32_t to = shared_address(out) + (c.warp() * 16 + lane % 16) * kRow;
#pragma unroll
    for (int j = 0; j < C.value_dim / 8; j += 2) {
      const float* x = c.o + 4 * j;
      const int place = Traits::Place::piece(lane % 8, j % kPieces + lane / 16);
      store_matrices(to + j / kPieces * (64 * kRow) + place, pack(x[0] * scale[0], x[1] * scale[0]),
                     pack(x[2] * scale[1], x[3] * scale[1]), pack(x[4] * scale[0], x[5] * scale[0]),
                     pack(x[6] * scale[1], x[7] * scale[1]));
    }
    const int head = item.work.kv_head * c.p.schedule.params.group, query = whole.tiles[group].query;
    fence_async_shared();
    team_barrier(group);
    if (c.thread % 128 != 0) return;
#pragma unroll
    for (int chunk = 0; chunk < Traits::kValueChunks; ++chunk) {
      tensor_store(params.out, shared_address(out) + chunk * (64 * kRow), chunk * Traits::kChunkDims, head,
                   query);
    }
    tensor_store_commit();
  }
  /// Until the copies of earlier items have read shared memory.
  static __device__ void drain(const Consumer<C>& c) {
    if (Traits::kStagesOutput && c.thread % 128 == 0) tensor_store_wait();
  }

  /// Neighbours exchange halves of 16 dims, so that four lanes write 32 bytes together. `pack`: two values.
  template <class Pack>
  __device__ void write_16bit(std::uint16_t* row, int r, float scale, bool keep, const Pack& pack) const {
    const int lane = thread_index() % 4;  // anew: registers are few
    const bool odd = lane & 1;
    std::uint16_t* to = row + (lane & 2) * 2 + (odd ? 8 : 0);
    asm volatile("" : "+l"(to));  // one address, not one worked out anew for each store
#pragma unroll
    for (int j = 0; j < kDims / 8; j += 2) {
      const float* x = c.o + 4 * j + 2 * r;
      const std::uint32_t low = pack(x[0] * scale, x[1] * scale), high = pack(x[4] * scale, x[5] * scale);
      const std::uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
      store_two_if(keep, to + 8 * j, odd ? got : low, odd ? high : got);
    }
  }

  /// Merges rows [first, end) of the warpgroup's in all parts of the unit, and writes them: a row over kLanes
  /// lanes.
  template <int kLanes>
  __device__ void merge_rows(const UnitParts<C>& parts, int first, int end) const {
    using Merged = Row<C.value_dim, kLanes>;
    // That a lane has under way; fewer where registers have something of the next item.
    constexpr int kReads = Traits::kComputeRegisters > 200 ? 16 : Traits::kTakesAhead ? 8 : 12;
    const AttentionParams& p = c.p;
    first += (4 * c.share() + c.warp()) * Merged::kGroup;
#pragma unroll 1
    for (; first < end; first += 4 * C.shares * Merged::kGroup) {
      const int own = first + c.lane() / kLanes, row = 64 * c.rows_index() + min(own, end - 1);
      Merged r;
      r.template weigh<(kReads > Merged::kQuads ? kReads / Merged::kQuads : 1)>(
          parts.slots.parts(item.first_slot, 1, item.parts, row), c.lane());
      const RowPlace to = place(row);
      RowEnd state = Traits::kStaged ? row_end_with_offset<kLanes>(p, to, r.max, r.sum, c.lane(), own < end)
                                     : row_end(p, to.head, r.max, r.sum, own < end);
      if (state.scale != 0.0f) state.scale *= value_scale();  // which may be none
      write_row<C.value_dim, RowStore::kPairs>(p, to, r, state, c.lane(), own < end);
    }
  }
  /// Stores the part, and merges what rows of all parts fall to it.
  __device__ void merge() const {
    const UnitParts<C> parts{c, item, index};
    parts.store();
    const int rows = min(64, item.work.row_end - item.work.row_begin - 64 * c.rows_index());
    const int owners = SharedMerge::owners(item.parts);
#pragma unroll 1
    for (std::uint32_t left = parts.arrive(); left != 0; left &= left - 1) {
      const int owner = __ffs(left) - 1, first = SharedMerge::first_piece(rows, owner, owners),
                end = SharedMerge::first_piece(rows, owner + 1, owners);
      if constexpr (C.value_dim != 128) {
        merge_rows<16>(parts, first, end);
      } else if (item.parts <= kFewParts) {
        merge_rows<8>(parts, first, end);
      } else {
        merge_rows<32>(parts, first, end);
      }
    }
  }

  __device__ void operator()() const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      c.softmax.sum[r] = sum_of_lanes<1, 4>(c.softmax.sum[r]);
    }
    if (item.work.partial < 0) {
      write();
    } else {
      merge();
    }
  }
};

}  // namespace halftone::cuda
