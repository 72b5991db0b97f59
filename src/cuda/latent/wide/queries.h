// The queries of a thread block: 64 packed rows, as f16 in the columns' order in shared memory and, the last
// column and the rope part, as A fragments. A warp of the score warpgroup arranges the rows that are its own
// in the products, and brings what tensor copies do not.
#pragma once

#include "cuda/attention/rows.h"
#include "cuda/device/pairs.h"
#include "cuda/device/tma.h"
#include "cuda/device/wgmma.h"
#include "cuda/latent/wide/pass.h"

namespace halftone::cuda::wide {

template <LatentWideConfig C>
struct Queries {
  static constexpr bool kNarrows = C.q_dtype != kProducts;  // to f16, whose range is smaller
  // Sizes of f16 numbers as integers: a row's largest element is to lie between them.
  static constexpr std::uint32_t kLeast = 5 << 10, kMost = 30 << 10;  // 2^-10, 2^15
  static constexpr int kLastColumn = kQueryColumns;
  static constexpr int kDims = Record<C>::kKeyDim;

  const LatentWideParams& params;
  Shared& s;
  int rank;
  const AttentionParams& p = params.attention;
  unsigned thread;           // of the warpgroup; read anew now and then, to free its register
  std::uint32_t last[4][4];  // the last column of the latent part, f16
  std::uint32_t rope[4][4];  // bf16, or f16 with f16 queries; not with kRotaryV
  float factor[2];           // of rows g and g + 8: what turns a product into a base-2 logit

  __device__ void locate() { thread = thread_index() - 128; }
  __device__ int warp() const { return int(thread / 32); }
  __device__ int lane() const { return int(thread % 32); }

  __device__ const std::uint16_t* row_of(const DeviceItem& item, int row) const {
    const RowPlace place = place_of(p, item, kRows * rank + row);
    return static_cast<const std::uint16_t*>(p.q) + place.token * p.q_token_stride +
           place.head * p.q_head_stride;
  }
  __device__ std::uint8_t* place(int row, int eight) const {
    return s.q[column_of(eight)] + place_in_column(row, chunk_of(eight));
  }
  /// A lane's eights of a row are this one and the one 32 on, some of which are fragments: eight lanes write
  /// eight chunks of a column.
  __device__ int own_eight() const { return lane() / 16 * 16 + lane() % 8 * 2 + lane() / 8 % 2; }
  __device__ bool staged(int i) const { return column_of(own_eight() + 32 * i) != kLastColumn; }

  /// Begins to bring the rows of an item; none of the old ones is needed any more. Rows that it lacks become
  /// zeros, repeat its last one or are those of others.
  __device__ void request(const DeviceItem& item) {
    const int rows = own_rows(item.work, rank);
    if (params.q_boxes) copy_boxes(item);  // also of a block without rows: the barrier counts items
    if (rows == 0) return;
    const auto mine =
        reinterpret_cast<unsigned long long>(row_of(item, min(warp() * 16 + lane() % 16, rows - 1)));
    const auto row_at = [&](int i) {
      return reinterpret_cast<const std::uint16_t*>(__shfl_sync(~0u, mine, i));
    };
    if (params.q_boxes) {
      copy_column(rows - warp() * 16, row_at);
    } else if (p.q_aligned) {
      const std::uint32_t to = shared_address(place(warp() * 16, own_eight()));
      const int rows_here = rows - warp() * 16;
      const bool two = staged(1);
      constexpr int kAtOnce = 4;  // rows: their copies would each wait for the shuffle before it
#pragma unroll 1
      for (int base = 0; base < 16; base += kAtOnce) {
        const std::uint16_t* row[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) row[i] = row_at(base + i) + 8 * own_eight();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const std::uint32_t at = (to ^ (base + i) % 8 * 16) + (base + i) * 128;  // its swizzle
          const int bytes = base + i < rows_here ? 16 : 0;
          copy_async(at, row[i], bytes);
          if (two) copy_async(at + 4 * kColumnBytes, row[i] + 8 * 32, bytes);
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        const std::uint16_t* const row = row_at(i / 2);
        const int eight = lane() + 32 * (i % 2);
        if (column_of(eight) == kLastColumn) continue;
        *reinterpret_cast<uint4*>(place(warp() * 16 + i / 2, eight)) =
            warp() * 16 + i / 2 < rows ? load_eight(row + 8 * eight, false) : uint4{};
      }
    }
    const std::uint16_t* from[2] = {row_at(lane() / 4), row_at(lane() / 4 + 8)};
    if (p.q_aligned) {
      load_fragments<false>(
          from, [](const std::uint16_t* at) { return __ldg(reinterpret_cast<const unsigned*>(at)); });
    } else {
      load_fragments<true>(from,
                           [](const std::uint16_t* at) { return __ldg(at) | unsigned{__ldg(at + 1)} << 16; });
    }
  }
  /// All columns but the last one in shared memory, dims as they are, by tensor copies: rows of other
  /// requests among them, whose results are not written.
  __device__ void copy_boxes(const DeviceItem& item) const {
    constexpr int kBoxes = kQueryColumns - 1;
    const std::uint32_t full = shared_address(&s.q_full);
    const int group = p.schedule.params.group, row = item.work.row_begin + kRows * rank;
    const int head = row % group, token = item.first_query + row / group;
    barrier_expect_bytes_if(thread == 0, full, kBoxes * kColumnBytes);
#pragma unroll
    for (int column = 0; column < kBoxes; ++column) {
      tensor_load_if(thread == 0, shared_address(s.q[column]), params.q, full, 64 * column, head, token);
    }
  }
  /// The warp's rows of that column, of whose dims the boxes would bring as many that are fragments.
  template <class RowAt>
  __device__ void copy_column(int rows, const RowAt& row_at) const {
    constexpr int kColumn = kQueryColumns - 1;
    const std::uint32_t to = shared_address(s.q[kColumn] + warp() * 16 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 8 + 4 * i, chunk = lane() % 8;
      copy_async(to + place_in_column(row, chunk), row_at(row) + dim_of(kColumn, chunk), row < rows ? 16 : 0);
    }
  }
  /// Brings an item's rows to L2.
  __device__ void prefetch(const DeviceItem& item) const {
    constexpr int kLine = 128, kLines = kDims * 2 / kLine + 1;  // that a row touches
    static_assert(kLines <= 16);
    const int rows = own_rows(item.work, rank), line = lane() % 16;
    if (rows == 0) return;
    const auto mine =
        reinterpret_cast<unsigned long long>(row_of(item, min(warp() * 16 + lane() % 16, rows - 1)));
#pragma unroll 1
    for (int i = 0; i < 16; i += 2) {
      const auto* const row = reinterpret_cast<const std::uint8_t*>(__shfl_sync(~0u, mine, i + lane() / 16));
      const int byte = min(line * kLine, kDims * 2 - 1);
      if (line < kLines) prefetch_to_l2(row + byte);
    }
  }
  /// Fragments of rows g and g + 8. Some at a time, where a load is many.
  template <bool kSome, class Load>
  __device__ void load_fragments(const std::uint16_t* const (&rows)[2], const Load& load) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint16_t* from = rows[r] + lane() % 4 * 2;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          last[step][2 * half + r] = load(from + dim_of(kLastColumn, 2 * step + half));
          if (kSome) asm volatile("" : "+l"(from), "+r"(last[step][2 * half + r]));
          if constexpr (!kRotaryV<C>) {
            rope[step][2 * half + r] = load(from + kLatentDims + 16 * step + 8 * half);
            if (kSome) asm volatile("" : "+l"(from), "+r"(rope[step][2 * half + r]));
          }
        }
      }
    }
  }

  static __device__ std::uint32_t narrow(std::uint32_t x, float scale = 1.0f) {
    return pack_f16x2(__uint_as_float(x << 16) * scale, __uint_as_float(x & 0xffff0000u) * scale);
  }
  /// Eight elements; `most` becomes the largest of them by size, with any sign.
  static __device__ void narrow(uint4& x, std::uint32_t& most) {
    if constexpr (!kNarrows) return;
    x = {narrow(x.x), narrow(x.y), narrow(x.z), narrow(x.w)};
    most = larger(larger(larger(larger(most, x.x), x.y), x.z), x.w);
  }
  static __device__ std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
    return larger_pair<false, false>(a, b);
  }
  /// The size of the larger of two.
  static __device__ std::uint32_t largest(std::uint32_t x) { return max(x & 0x7fffu, x >> 16 & 0x7fffu); }

  /// Until the rows of item `index` are there. The warpgroup's barrier must follow.
  __device__ void complete(const DeviceItem& item, int index) {
    factor[0] = factor[1] = p.scale_log2;
    if (params.q_boxes) barrier_wait(shared_address(&s.q_full), index % 2);
    copy_async_wait();
    __syncwarp();  // the warp's rows are there
    // A block without rows may have brought none: what lies there is no query.
    if (own_rows(item.work, rank) > 0) {
      const bool fits = arrange_rows(item);
      if constexpr (kNarrows) {
        if (!fits) scale_rows(item);
      }
    }
    fence_async_shared();
  }

 private:
  /// What was copied becomes f16 in the order of column_of(): of each two columns, 8 rows at a time. False: a
  /// row needs a power of two.
  __device__ bool arrange_rows(const DeviceItem& item) {
    if (!kNarrows && !params.q_boxes) return true;
    const int rows = own_rows(item.work, rank) - warp() * 16;
    const int piece = lane() % 8;  // of a row, 16 bytes, as they lie
    std::uint32_t at = shared_address(s.q[0] + warp() * 16 * 128) + lane() * 16;
    std::uint32_t mosts[4] = {};  // of rows lane / 8 + 4 i
    // Where a lane's two pieces of row lane / 8, or of the row 4 on, go to. Boxes have dims as they are:
    // piece m of the first column is eight m, whose place is column m % 2, chunk m / 2; of the second, chunk
    // 4 + m / 2. Lanes of odd pieces begin with the second one, so that eight lanes write eight chunks.
    int to[2][2];
    const bool odd = params.q_boxes && (piece ^ lane() / 8) & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane() / 8 + 4 * i, eight = piece ^ row;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        to[i][k] = params.q_boxes ? eight % 2 * kColumnBytes + (((odd ^ k) * 4 + eight / 2) ^ row) * 16
                                  : k * kColumnBytes + piece * 16;
        to[i][k] += 4 * i * 128 - piece * 16;
      }
    }
#pragma unroll 1
    for (int column = 0; column < kQueryColumns - 1; column += 2, at += 2 * kColumnBytes) {
#pragma unroll
      for (int eights = 0; eights < 2; ++eights) {
        const std::uint32_t from = at + eights * (8 * 128);
        uint4 x[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i / 2][i % 2] = load_shared_16_bytes(from + i / 2 * (4 * 128) + i % 2 * kColumnBytes);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          narrow(x[i][0], mosts[2 * eights + i]);
          narrow(x[i][1], mosts[2 * eights + i]);
          store_shared(from + to[i][0], odd ? x[i][1] : x[i][0]);
          store_shared(from + to[i][1], odd ? x[i][0] : x[i][1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < (kNarrows ? 4 : 0); ++i) {
      uint4 x = load_shared_16_bytes(at + i * (4 * 128));
      narrow(x, mosts[i]);
      store_shared(at + i * (4 * 128), x);
    }
    if (!kNarrows) return true;
    bool fits = true;
    std::uint32_t some = 0;  // rows with an element that is not small
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 8 + 4 * i;
      fits = fits && (row >= rows || largest(mosts[i]) <= kMost);
      if (largest(mosts[i]) >= kLeast || row >= rows) some |= 1u << row;
    }
    const bool none_small = __reduce_or_sync(~0u, some) == 0xffffu;  // by all lanes, whatever their rows have
    fits = fits && none_small;
    std::uint32_t most = 0, narrowed[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        narrowed[step][i] = narrow(last[step][i]);
        most = larger(most, narrowed[step][i]);
      }
    }
    fits = __all_sync(~0u, fits && largest(most) <= kMost);
    if (fits) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) last[step][i] = narrowed[step][i];
      }
    }
    return fits;
  }

  /// Rows whose largest element is out of bounds lose a power of two, which the logits get back.
  __device__ float scale_row(const std::uint16_t* from, int row) const {
    float most = 0.0f;
#pragma unroll 1
    for (int i = lane(); i < kDims; i += 32) {
      const float x = fabsf(__uint_as_float(std::uint32_t{__ldg(from + i)} << 16));
      if (x < __builtin_huge_valf()) most = fmaxf(most, x);
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
    const int bits = static_cast<int>(__float_as_uint(most) >> 23);
    const bool within = most == 0.0f || (bits >= 117 && bits < 142);
    const float scale = within ? 1.0f : __uint_as_float(static_cast<std::uint32_t>(254 - max(bits, 1)) << 23);
#pragma unroll 1
    for (int eight = lane(); eight < kLatentDims / 8; eight += 32) {
      if (column_of(eight) == kLastColumn) continue;
      const uint4 x = load_eight(from + 8 * eight, false);
      *reinterpret_cast<uint4*>(place(row, eight)) = {narrow(x.x, scale), narrow(x.y, scale),
                                                      narrow(x.z, scale), narrow(x.w, scale)};
    }
    return scale;
  }
  __device__ void scale_rows(const DeviceItem& item) {
    const int rows = own_rows(item.work, rank);
    float scale[2] = {1.0f, 1.0f};
    __syncwarp();  // other lanes have narrowed what this one writes
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int row = warp() * 16 + i;
      if (row >= rows) break;
      const float x = scale_row(row_of(item, row), row);
      if (i % 8 == lane() / 4) {
        if (i < 8) {
          scale[0] = x;
        } else {
          scale[1] = x;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = p.scale_log2 / scale[r];
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = r; i < 4; i += 2) {
          last[step][i] = narrow(last[step][i], scale[r]);
          if (kRotaryV<C>) continue;
          const std::uint32_t x = rope[step][i];
          rope[step][i] =
              pack_bf16x2(__uint_as_float(x << 16) * scale[r], __uint_as_float(x & 0xffff0000u) * scale[r]);
        }
      }
    }
  }
};

}  // namespace halftone::cuda::wide
