// Rows of an append from global memory to values in registers, as the codec gets them, and their extents.
#pragma once

#include "cuda/append/row.h"
#include "cuda/device/rotate.h"

namespace halftone::cuda {

/// Rows of a lane, tokens first + away(k), on their way to the codec of `kType`. `kDim`: of all rows, or 0.
/// Chunk k * kHalves + h is that of row k and, of wide rows, half h.
template <DType kType, int kRows, RowKind kKind, int kDim = 0, int kHalves = 1>
struct Rows {
  static constexpr bool kPlain = kKind == RowKind::kPlain, kAny = kKind == RowKind::kAny;
  static constexpr bool kCopies = kPlain && dtype_bits(kType) == 16;
  static constexpr int kChunks = kRows * kHalves;
  static_assert(!kPlain || kHalves == 1);
  static constexpr bool kLoops = kHalves == 2 && !kAny;  // takes a dim at a time: the least code
  std::int64_t first;
  std::int32_t position[kRows];  // for RoPE
  const std::uint16_t* from;     // chunk of row 0 in an input that loads early
  unsigned exist;                // rows that are tokens, a bit each
  uint4 raw[kChunks];            // chunks that load early
  uint4 codes[kChunks];          // kCopies: instead of x
  float x[kChunks][kChunk];

  static constexpr int kEnd = kRows == 1 ? 1 : 10;  // above away(k)
  static __device__ constexpr int away(int k) { return k % 2 + k / 2 * 8; }
  /// The chunk of its row.
  static __device__ __forceinline__ int chunk_of(const RowLane& lane, int c) {
    return lane.chunk + c % kHalves * kHalfChunks;
  }
  /// Bit of the row of chunk c.
  static __device__ __forceinline__ bool wants(unsigned rows, int c) { return rows >> c / kHalves & 1; }

  /// Issues what can be loaded before the slots are known.
  __device__ __forceinline__ void load(const AppendParams& p, const AppendPart& part, const RowLane& lane,
                                       int head) {
    const std::int64_t left = p.tokens - first;
    const int end = left < kEnd ? static_cast<int>(left) : kEnd;
    const bool rope = !kPlain && ropes(p, part);
    exist = 0;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      exist |= away(k) < end ? 1u << k : 0;
      position[k] = rope && away(k) < end ? __ldg(p.positions + first + away(k)) : -1;
    }
    load_head(part, lane, head);
  }

  /// The same rows of another head.
  __device__ __forceinline__ void load_head(const AppendPart& part, const RowLane& lane, int head) {
    from =
        static_cast<const std::uint16_t*>(part.input) + input_offset(part, first, head) + lane.chunk * kChunk;
    load_chunks(part, lane);
  }

  /// The same rows, `heads` further on.
  __device__ __forceinline__ void load_next(const AppendPart& part, const RowLane& lane, int heads) {
    from += heads * part.head_stride;
    load_chunks(part, lane);
  }

  /// The rows as the codec gets them, in x, with kCopies its codes. Bit k of `wanted`: row k is written, so
  /// what is wrong with it sets the status.
  __device__ __forceinline__ void transform(const AppendParams& p, const AppendPart& part,
                                            const RowLane& lane, int head, unsigned wanted) {
    const auto offset = [&](int k) { return input_offset(part, first + away(k), head); };
    if constexpr (kCopies) {
      copy(p, wanted);
      return;
    }
    if (kAny && !loads_early(part)) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[c][i] = 0.0f;
        if (lane.live && wants(wanted, c)) load_late(part, offset(c / kHalves), chunk_of(lane, c), x[c]);
      }
    } else if (part.input_type == DType::kBFloat16) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) unpack(raw[c], true, x[c]);
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) unpack(raw[c], false, x[c]);
    }
    if (kPlain) return;
    check(p, part, wanted);
    if (ropes(p, part)) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const bool mine = wanted >> k & 1, exists = position[k] >= 0 && position[k] < p.rope_rows;
        if (mine && !exists) set_status(p, kStatusBadPage);
        const std::int64_t row = mine && exists && lane.live ? position[k] : -1;
        if constexpr (kAny) {
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
            RowLane of = lane;
            of.chunk = chunk_of(lane, h);
            rope_row<kHalves == 2>(p, part, of, offset(k), row, x[k * kHalves + h]);
          }
        } else if constexpr (kLoops) {
          if (row < 0) continue;
          each_dim(lane, [&](int d, float value) { return rope_dim(p, part, offset(0), row, d, value); });
        } else {
          rope_whole_row(p, lane, row, x[k]);
        }
      }
    }
    if (part.channels.any() && lane.live) {
      if constexpr (kLoops) {
        loop_channels(p, part, lane, head, wanted);
      } else {
        treat_channels(p, part, lane, head, wanted);
      }
    }
    if (part.part.rotated) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if constexpr (kHalves == 2) {
          rotate_halves(x[2 * k], x[2 * k + 1], lane.chunk);
        } else {
          rotate_row(kDim > 0 ? kDim : part.part.dim, x[k], lane.segment_first + lane.chunk);
        }
      }
    }
  }

  /// Takes off the channels' offset and scale.
  __device__ __forceinline__ void treat_channels(const AppendParams& p, const AppendPart& part,
                                                 const RowLane& lane, int head, unsigned wanted) {
    bool good = true;
#pragma unroll
    for (int j = 0; j < kHalves * kChunk; ++j) {
      const int h = j / kChunk, i = j % kChunk;
      const std::int64_t channel = std::int64_t{head} * part.part.dim + chunk_of(lane, h) * kChunk + i;
      const float offset = part.channels.offset_at(channel);
      const float inverse = part.channels.inverse_at(channel);
      good =
          good && Channels::is_offset(offset) && Channels::is_scale(inverse);  // its limits are each other's
#pragma unroll
      for (int c = h; c < kChunks; c += kHalves) {
        x[c][i] = codec::ht_mul(codec::ht_sub(x[c][i], offset), inverse);
      }
    }
    if (!good && wanted != 0) set_status(p, kStatusBadScale);
  }

  /// Sets the status if a wanted row has a value that append does not accept.
  __device__ __forceinline__ void check(const AppendParams& p, const AppendPart& part,
                                        unsigned wanted) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float largest = fabsf(x[c][0]);
#pragma unroll
      for (int i = 1; i < kChunk; ++i) largest = max_or_nan(largest, fabsf(x[c][i]));
      if (!(largest <= part.largest) && wants(wanted, c)) report_value(p, largest);
    }
  }

  /// Chunk 1 takes the place of chunk 0.
  __device__ __forceinline__ void take_half() {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[0][i] = x[1][i];
  }

  /// The codes of chunk c. `kWithin`: as of ChunkCodes.
  template <bool kWithin = false, class Codes>
  __device__ __forceinline__ void encode(const codec::Params& params, int c, Codes& out) const {
    if constexpr (kCopies) {
      out.words[0] = codes[c].x, out.words[1] = codes[c].y;
      out.words[2] = codes[c].z, out.words[3] = codes[c].w;
    } else {
      out.template encode<kWithin>(params, x[c]);
    }
  }

  /// Extents of a lane's chunks. NaN, which sets the status, does not count. `kChecks`: instead of check(),
  /// of values as they came in.
  template <bool kAbsolute, bool kChecks>
  __device__ __forceinline__ void extents(const AppendParams& p, const AppendPart& part, unsigned wanted,
                                          codec::Range (&r)[kChunks]) const {
    chunk_extents<kAbsolute, kChecks>(r);
    if (!kChecks) return;
    bool any = false;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const bool good = r[c].hi <= part.largest && (kAbsolute || r[c].lo >= -part.largest);
      any |= !good && wants(wanted, c);
    }
    if (any) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float largest = kAbsolute ? r[c].hi : max_or_nan(r[c].hi, -r[c].lo);
        if (!(largest <= part.largest) && wants(wanted, c)) report_value(p, largest);
      }
      chunk_extents<kAbsolute, false>(r);
    }
  }

 private:
  /// treat_channels() by each_dim().
  __device__ __forceinline__ void loop_channels(const AppendParams& p, const AppendPart& part,
                                                const RowLane& lane, int head, unsigned wanted) {
    bool good = true;
    const std::int64_t channels = std::int64_t{head} * part.part.dim;
    each_dim(lane, [&](int d, float value) {
      const float offset = part.channels.offset_at(channels + d);
      const float inverse = part.channels.inverse_at(channels + d);
      good = good && Channels::is_offset(offset) && Channels::is_scale(inverse);
      return codec::ht_mul(codec::ht_sub(value, offset), inverse);
    });
    if (!good && wanted != 0) set_status(p, kStatusBadScale);
  }

  /// Replaces a lane's values of a row by to(dim, value), in the least code: one at a time.
  template <class To>
  __device__ __forceinline__ void each_dim(const RowLane& lane, const To& to) {
    static_assert(kRows == 1);
#pragma unroll 1
    for (int i = 0; i < kHalves * kChunk; ++i) {
      const float value = to(chunk_of(lane, i / kChunk) * kChunk + i % kChunk, x[0][0]);
#pragma unroll
      for (int j = 0; j + 1 < kHalves * kChunk; ++j)
        x[j / kChunk][j % kChunk] = x[(j + 1) / kChunk][(j + 1) % kChunk];
      x[kHalves - 1][kChunk - 1] = value;
    }
  }

  /// The rows' codes: what came in, clamped where append does not accept it, which sets the status.
  __device__ __forceinline__ void copy(const AppendParams& p, unsigned wanted) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      codes[c] = raw[c];
      if (is_accepted<kType>(raw[c]) || !wants(wanted, c)) continue;
      std::uint32_t* const words[] = {&codes[c].x, &codes[c].y, &codes[c].z, &codes[c].w};
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float value = half_of(*words[i / 2], i % 2, kType == DType::kBFloat16);
        const std::uint32_t code = codec::Codec<kType>::encode({}, value);
        *words[i / 2] = __byte_perm(*words[i / 2], code, i % 2 ? 0x5410 : 0x3254);
        if (!(fabsf(value) <= codec::kMaxInput)) set_status(p, kStatusNonFinite);
      }
    }
  }

  __device__ __forceinline__ void load_chunks(const AppendPart& part, const RowLane& lane) {
    const bool early = lane.live && (!kAny || loads_early(part));
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const auto* at = reinterpret_cast<const uint4*>(from + away(c / kHalves) * part.token_stride +
                                                      c % kHalves * kHalfDims);
      raw[c] = early && wants(exist, c) ? __ldg(at) : uint4{};
    }
  }

  /// `kNan`: the upper end is NaN if a value is.
  template <bool kAbsolute, bool kNan>
  __device__ __forceinline__ void chunk_extents(codec::Range (&r)[kChunks]) const {
    const auto larger = [](float a, float b) { return kNan ? max_or_nan(a, b) : fmaxf(a, b); };
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      r[c].lo = kAbsolute ? 0.0f : x[c][0];
      r[c].hi = kAbsolute ? fabsf(x[c][0]) : x[c][0];
#pragma unroll
      for (int i = 1; i < kChunk; ++i) {
        if (!kAbsolute) r[c].lo = fminf(r[c].lo, x[c][i]);
        r[c].hi = larger(r[c].hi, kAbsolute ? fabsf(x[c][i]) : x[c][i]);
      }
    }
  }
};

/// Extents of groups of 1 << `chunks_log2` chunks from those of each lane's. The chunks of idle lanes are
/// zero.
template <bool kAbsolute, int kHalves = 1, int kChunks>
__device__ __forceinline__ void group_extents(const RowLane& lane, int chunks_log2,
                                              codec::Range (&r)[kChunks]) {
  if (!kAbsolute && !lane.live) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) r[k] = {};
  }
  if (kHalves == 2 && 1 << chunks_log2 > kHalfChunks) {
#pragma unroll
    for (int k = 0; k < kChunks; k += 2) {
      const codec::Range both{fminf(r[k].lo, r[k + 1].lo), fmaxf(r[k].hi, r[k + 1].hi)};
      r[k] = r[k + 1] = both;
    }
  }
  join_groups<kAbsolute>(chunks_log2, r);
}

}  // namespace halftone::cuda
