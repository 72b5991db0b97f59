// The prefill kernels that are built: a row each, its shape chosen for the registers and the shared memory of
// an SM.
#pragma once

#include <array>

#include "cuda/attention/part_config.h"
#include "halftone/attention.h"

namespace halftone::cuda {

/// What Q K^T multiplies.
enum class PrefillKeys : std::uint8_t {
  kGiven,   ///< K as the caller has it, and Q, both of the type of V
  kScaled,  ///< f16 with a scale per key, staged; Q becomes f16 with a scale per row
  kCodes,   ///< codes of 8 bits with a scale per key or head, integers or, beside V in E4M3, such; so Q, per
            ///< row. Staged, but for those of E4M3 that a page has
  kCodePages,  ///< codes of E4M3 in their pages, as V's, which warps turn over in shared memory
  kPacked,  ///< codes in their pages, as V's, which warps beside those that load them turn into f16 in shared
            ///< memory; Q becomes f16 with a scale per row
};

/// One kernel. The packed query rows of a unit are M of the products, 64 for each warpgroup or for those that
/// share rows; tokens are N of Q K^T and k of P V.
struct PrefillConfig {
  PrefillKeys keys;
  DType dtype;     ///< of V and the operands of P V; of given keys also of Q and K
  int head_dim;    ///< of Q and K
  int value_dim;   ///< of V and O
  int warpgroups;  ///< that compute
  int kv_tile;     ///< tokens of a step: what registers hold of S beside O and P
  int stages;      ///< tiles of K, and of V, in shared memory
  /// Where shared memory has room for two items' queries, the next item's are there before its turn, and O
  /// leaves by way of those that are done with.
  int query_buffers;
  /// Dims lie in shared memory in chunks of so many bytes, 128 or 64, over which they are swizzled. 64 where
  /// less of the last chunk is then left over.
  int row_bytes = 128;
  /// Warpgroups that have the same 64 rows, where registers of one do not hold their O: each has its part of
  /// the dims of V, and computes P for itself.
  int shares = 1;
  int kept_steps = 0;     ///< of Q K^T, 32 bytes of a row of Q each, which registers keep for an item
  PartConfig part = {};   ///< of packed K and V
  int packed_stages = 0;  ///< tiles of packed K and V in shared memory
  int promoted_keys = 0;  ///< of E4M3: after so many O moves to sums of earlier tiles (promote.h)
  /// Of a lane's values of O, four together, how many have those sums in what shared memory is left.
  int promoted_near = 0;
};

/// Of a chunk of K. Codes of E4M3 lie in shared memory as a page has them: chunks of 64 dims, in the order of
/// code_chunk() (stage.h). Integers whose rows are no whole chunks of 128 lie in chunks of 64, too, in the
/// order of their dims.
constexpr int key_row_bytes(const PrefillConfig& c) {
  const bool halves = c.keys == PrefillKeys::kCodes && c.head_dim % 128 != 0;
  return c.dtype == DType::kFloat8E4M3 || halves ? 64 : c.row_bytes;
}

/// The type of Q and K as they are multiplied beside V in `dtype`.
constexpr DType operand_of(PrefillKeys keys, DType dtype) {
  if (dtype == DType::kFloat8E4M3) return dtype;
  if (keys == PrefillKeys::kCodes) return DType::kInt8;
  return keys == PrefillKeys::kScaled ? DType::kFloat16 : dtype;
}

constexpr int row_groups(const PrefillConfig& c) { return c.warpgroups / c.shares; }
constexpr int rows_of(const PrefillConfig& c) { return 64 * row_groups(c); }
/// Chunks of a row of Q that its codes take, which are half as long.
constexpr int code_chunks(const PrefillConfig& c) { return (c.head_dim + 127) / 128; }
/// How many have their sums in shared memory: those and what room Q's codes leave of its place, where a whole
/// chunk is left. Those of the others are in the workspace.
constexpr int near_sums(const PrefillConfig& c) {
  if (c.dtype != DType::kFloat8E4M3) return 0;
  return c.promoted_near + 4 * ((c.head_dim + 63) / 64 - code_chunks(c)) / c.shares;
}

/// Up to so many parts of a unit are merged four rows at a time by a warp at value_dim 128, more of them a
/// row at a time. Kernels of other dims have one form for all, of two rows: two forms are 13 KB more.
inline constexpr int kFewParts = 8;

/// Both products in E4M3.
constexpr PrefillConfig e4m3(PrefillKeys keys, int head_dim, int warpgroups, int kv_tile, int stages,
                             int query_buffers, int promoted_keys, int promoted_near, int value_dim = 0,
                             int shares = 1) {
  return {.keys = keys,
          .dtype = DType::kFloat8E4M3,
          .head_dim = head_dim,
          .value_dim = value_dim != 0 ? value_dim : head_dim,
          .warpgroups = warpgroups,
          .kv_tile = kv_tile,
          .stages = stages,
          .query_buffers = query_buffers,
          .shares = shares,
          .promoted_keys = promoted_keys,
          .promoted_near = promoted_near};
}

/// 512 dims: two warpgroups that share their rows. Shared memory binds, so what registers have left keeps Q.
constexpr PrefillConfig wide(PrefillKeys keys, DType dtype, int kv_tile, int kept_steps) {
  return {.keys = keys,
          .dtype = dtype,
          .head_dim = 512,
          .value_dim = 512,
          .warpgroups = 2,
          .kv_tile = kv_tile,
          .stages = 2,
          .query_buffers = 1,
          .shares = 2,
          .kept_steps = kept_steps};
}

/// Packed codes: two warpgroups, since others convert.
constexpr PrefillConfig packed(const PartConfig& part) {
  return {.keys = PrefillKeys::kPacked,
          .dtype = DType::kFloat16,
          .head_dim = 128,
          .value_dim = 128,
          .warpgroups = 2,
          .kv_tile = 96,
          .stages = 2,
          .query_buffers = 1,
          .part = part,
          .packed_stages = dtype_bits(part.dtype) == 8 ? 3 : 4};
}

/// Beside a row: TFLOP/s without a mask, causal, of 16,384 keys (4 x 4k: of four requests of 4,096) on an
/// H200; docs/kernels/prefill-measured.md has more. Given f16 is from a run of its own. Staged keys are those
/// of int8-head (beside V in E4M3: fp8), staging included.
inline constexpr std::array kPrefillTable{
    PrefillConfig{PrefillKeys::kGiven, DType::kBFloat16, 64, 64, 3, 96, 4, 2},      // 538, 517
    PrefillConfig{PrefillKeys::kGiven, DType::kFloat16, 64, 64, 3, 96, 4, 2},       // 535, 510
    PrefillConfig{PrefillKeys::kGiven, DType::kBFloat16, 80, 80, 3, 96, 4, 2, 64},  // 564, 599
    PrefillConfig{PrefillKeys::kGiven, DType::kFloat16, 80, 80, 3, 96, 4, 2, 64},   // 545, 624
    PrefillConfig{PrefillKeys::kGiven, DType::kBFloat16, 96, 96, 3, 96, 4, 2, 64},  // 675, 606
    PrefillConfig{PrefillKeys::kGiven, DType::kFloat16, 96, 96, 3, 96, 4, 2, 64},   // 626, 604
    PrefillConfig{PrefillKeys::kGiven, DType::kBFloat16, 128, 128, 3, 80, 3, 2},    // 731, 687
    PrefillConfig{PrefillKeys::kGiven, DType::kFloat16, 128, 128, 3, 80, 3, 2},     // 741, 793
    // Chunks of a few hundred rows: units of 192 fill them badly, or the SMs. f16: 512 queries, 4,096 keys.
    PrefillConfig{PrefillKeys::kGiven, DType::kBFloat16, 128, 128, 2, 112, 3, 1},  // an H100: 640 causal
    PrefillConfig{PrefillKeys::kGiven, DType::kFloat16, 128, 128, 2, 112, 3, 1},   // 519; bf16 516
    PrefillConfig{PrefillKeys::kGiven, DType::kBFloat16, 192, 128, 3, 80, 3, 1},   // 756, 691
    PrefillConfig{PrefillKeys::kGiven, DType::kFloat16, 192, 128, 3, 80, 3, 1},    // 719, 681
    PrefillConfig{PrefillKeys::kGiven, DType::kBFloat16, 192, 192, 2, 96, 2, 1},   // 735, 646
    PrefillConfig{PrefillKeys::kGiven, DType::kFloat16, 192, 192, 2, 96, 2, 1},    // 727, 695
    PrefillConfig{PrefillKeys::kGiven, DType::kBFloat16, 256, 256, 2, 80, 2, 1},   // 786, 647
    PrefillConfig{PrefillKeys::kGiven, DType::kFloat16, 256, 256, 2, 80, 2, 1},    // 706, 797
    wide(PrefillKeys::kGiven, DType::kBFloat16, 32, 12),                           // 4 x 4k: 453, 405
    wide(PrefillKeys::kGiven, DType::kFloat16, 32, 12),  // 4 x 4k, before Q was kept: 382, 352
    PrefillConfig{PrefillKeys::kScaled, DType::kFloat16, 64, 64, 3, 96, 4, 2},  // 4 x 4k, an H100: 438, 393
    PrefillConfig{PrefillKeys::kScaled, DType::kFloat16, 80, 80, 3, 96, 4, 2, 64},  // likewise: 479, 408
    PrefillConfig{PrefillKeys::kScaled, DType::kFloat16, 96, 96, 3, 80, 4, 2, 64},  // likewise: 499, 463
    PrefillConfig{PrefillKeys::kScaled, DType::kFloat16, 128, 128, 3, 80, 3, 2},    // 687, 674
    PrefillConfig{PrefillKeys::kScaled, DType::kFloat16, 192, 128, 3, 80, 2, 1},    // 713, 653
    PrefillConfig{PrefillKeys::kScaled, DType::kFloat16, 192, 192, 2, 96, 2, 1},    // likewise: 637, 531
    PrefillConfig{PrefillKeys::kScaled, DType::kFloat16, 256, 256, 2, 80, 2, 1},    // likewise: 644, 556
    wide(PrefillKeys::kScaled, DType::kFloat16, 32, 12),                            // 4 x 4k: -, 391
    // V in bf16, or with scales in f32. K int8-head, V bf16:
    PrefillConfig{PrefillKeys::kScaled, DType::kBFloat16, 64, 64, 3, 96, 4, 2},      // 509, 494
    PrefillConfig{PrefillKeys::kScaled, DType::kBFloat16, 80, 80, 3, 96, 4, 2, 64},  // 4 x 4k: 459, 428
    PrefillConfig{PrefillKeys::kScaled, DType::kBFloat16, 96, 96, 3, 80, 4, 2, 64},  // 4 x 4k: 544, 472
    PrefillConfig{PrefillKeys::kScaled, DType::kBFloat16, 128, 128, 3, 80, 3, 2},    // 704, 662
    PrefillConfig{PrefillKeys::kScaled, DType::kBFloat16, 192, 128, 3, 80, 2, 1},    // 720, 695
    PrefillConfig{PrefillKeys::kScaled, DType::kBFloat16, 192, 192, 2, 96, 2, 1},    // 4 x 4k: 562, 519
    PrefillConfig{PrefillKeys::kScaled, DType::kBFloat16, 256, 256, 2, 80, 2, 1},    // 715, 677
    wide(PrefillKeys::kScaled, DType::kBFloat16, 32, 12),  // 4 x 4k, before Q was kept: 383, 319
    PrefillConfig{PrefillKeys::kCodes, DType::kFloat16, 128, 128, 3, 80, 4, 2},    // 736, 726
    PrefillConfig{PrefillKeys::kCodes, DType::kBFloat16, 128, 128, 3, 80, 4, 2},   // an H100: 718, 682
    PrefillConfig{PrefillKeys::kCodes, DType::kFloat16, 192, 128, 3, 80, 3, 1},    // 843, 783
    PrefillConfig{PrefillKeys::kCodes, DType::kBFloat16, 192, 128, 3, 80, 3, 1},   // of tensors: 828, 875
    PrefillConfig{PrefillKeys::kCodes, DType::kFloat16, 192, 192, 2, 112, 2, 1},   // -, 805
    PrefillConfig{PrefillKeys::kCodes, DType::kBFloat16, 192, 192, 2, 112, 2, 1},  // of tensors: 891, 827
    PrefillConfig{PrefillKeys::kCodes, DType::kFloat16, 256, 256, 2, 80, 2, 1},    // 901, 923
    PrefillConfig{PrefillKeys::kCodes, DType::kBFloat16, 256, 256, 2, 80, 2, 1},   // likewise: 965, 871
    wide(PrefillKeys::kCodes, DType::kFloat16, 48, 8),                             // 4 x 4k: -, 556
    wide(PrefillKeys::kCodes, DType::kBFloat16, 48, 8),                            // of tensors: 671, 599
    e4m3(PrefillKeys::kCodes, 64, 3, 128, 4, 2, 1536, 8),                          // 612, 581
    e4m3(PrefillKeys::kCodes, 128, 3, 96, 3, 2, 1536, 8),                          // an H100: 928, 906
    e4m3(PrefillKeys::kCodes, 192, 3, 96, 3, 1, 1536, 8, 128),                     // 1049, 994
    e4m3(PrefillKeys::kCodes, 192, 2, 128, 3, 1, 1536, 7),                         // of tensors: 1025, 999
    e4m3(PrefillKeys::kCodes, 256, 2, 96, 3, 1, 1536, 3),                          // an H100: 1053, 985
    e4m3(PrefillKeys::kCodes, 512, 2, 64, 2, 1, 1280, 7, 512, 2),                  // of int8-head: 672, 671
    // us of 128 and of 256 rows over 131,072 keys of 8 KV heads, an H100
    // (docs/kernels/prefill-codes-measured.md, of E4M3 prefill-fp8-measured.md)
    e4m3(PrefillKeys::kCodePages, 128, 2, 128, 3, 1, 1024, 12),  // 119, 191
    packed(parts::kFp8),                                         // 167, 282
    packed(parts::kFp8Token),                                    // 177, 300
    packed(parts::kInt8),                                        // 168, 286
    packed(parts::kInt8Token),                                   // 182, 312
    packed(parts::kInt4Token),                                   // 183, 317
    packed(parts::kInt4G32),                                     // 191, 331
    packed(parts::kInt4G64),                                     // 185, 321
};

constexpr bool is_built(const PrefillConfig& c) {
#ifdef HALFTONE_CUDA_HEAD_DIM  // a smaller build for development
  return c.head_dim == HALFTONE_CUDA_HEAD_DIM;
#else
  return c.head_dim > 0;
#endif
}

}  // namespace halftone::cuda
