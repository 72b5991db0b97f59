// The paged KV cache: geometry of the pages, a view of them, and the operations that write and read them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "halftone/format.h"
#include "halftone/types.h"

namespace halftone {

/// Tokens per tile, the unit in which a page stores codes and scales.
inline constexpr int kTileTokens = 16;

/// How the codes of a span lie within a tile.
enum class KvOrder : std::uint8_t {
  kFragments,  ///< as the tensor cores take them (docs/formats.md); scales in planes of their own
  kRows,       ///< a token's codes next to each other, in the order of its dims (4-bit: even dim low)
};

/// Consecutive dims of every token that are stored alike: what K and V are made of.
struct KvSpan {
  KvFormat format{};
  int dims = 0;
  bool rotate = false;  ///< stored after a block Hadamard rotation
  KvOrder order = KvOrder::kRows;
  int k_first = -1;  ///< the dim of K that the span begins with; -1: not a part of K
  int v_first = -1;  ///< likewise of V. A span may be a part of both
};

inline constexpr int kMaxSpans = 4;

/// The spans of a token and KV head, in the order in which they are stored and in which K and V have them.
struct KvSpans {
  std::array<KvSpan, kMaxSpans> span{};
  int count = 0;

  constexpr const KvSpan* begin() const { return span.data(); }
  constexpr const KvSpan* end() const { return span.data() + count; }
};

/// Everything that fixes the bytes of a page. Two kinds of caches: K and V stored apart, or, with rope_dim, a
/// latent (MLA, arXiv:2405.04434) that is K and V at once.
struct KvCacheSpec {
  KvFormat k_format{};
  KvFormat v_format{};
  int kv_heads = 0;       ///< >= 1; of a latent cache 1
  int head_dim = 0;       ///< of K (and Q): 64, 80, 96, 128, 192, 256 or 512; latent: v_head_dim + rope_dim
                          ///< or v_head_dim, which then has the rotary dims, too
  int v_head_dim = 0;     ///< of V (and O): the same choices; 0 means head_dim; latent: 256 or 512
  int page_size = 64;     ///< tokens per page: 16, 32, 64, 128 or 256
  bool rotate_k = false;  ///< store K after a block Hadamard rotation; attention rotates Q alike
  bool rotate_v = false;  ///< store V after a block Hadamard rotation; attention undoes it on the output
  int rope_dim = 0;       ///< 0: K and V apart. 32 or 64: a latent cache whose K ends in so many bf16 dims,
                     ///< those of the rotary embedding; V is K's first v_head_dim dims. v_format is k_format
  bool offset_k = false;  ///< store K less an offset per channel, PagedKv::k_channels.offset, which softmax
                          ///< cancels; attention adds it to LSE and sinks. Quantised, separate K only
  bool scale_k = false;   ///< store K divided by a scale per channel, which attention multiplies Q with

  friend constexpr bool operator==(const KvCacheSpec&, const KvCacheSpec&) = default;
  constexpr int v_dim() const { return v_head_dim == 0 ? head_dim : v_head_dim; }
  constexpr bool is_latent() const { return rope_dim != 0; }
  /// Whether channels of K are treated before a rotation and the format.
  constexpr bool has_channels() const { return offset_k || scale_k; }
  /// Dims of K before a latent's rotary ones, those in k_format.
  constexpr int latent_dim() const { return head_dim - rope_dim; }
  /// Dims of K that a rotary embedding may rotate: the first of a separate K, the last of a latent's.
  constexpr int rotary_dims() const { return is_latent() ? rope_dim : head_dim; }

  /// K and V apart, each a span; 16-bit formats in rows, packed ones in fragments.
  static constexpr KvCacheSpec separate(const KvFormat& k, const KvFormat& v, int kv_heads, int head_dim,
                                        int v_head_dim = 0, int page_size = 64) {
    return {k, v, kv_heads, head_dim, v_head_dim, page_size};
  }
  /// One vector per token that all query heads share: `latent_dim` dims in `format`, which are V and the
  /// beginning of K, then `rope_dim` dims in bf16. A token's bytes are contiguous; fp8-g128-f32 with 512 and
  /// 64 dims gives the 656-byte token of FlashMLA. With `rotary_v` all dims are V: fp8-g64-e8m0 with 448 and
  /// 64 dims gives its token of 584 bytes.
  static constexpr KvCacheSpec latent(const KvFormat& format, int latent_dim = 512, int rope_dim = 64,
                                      int page_size = 64, bool rotary_v = false) {
    const int dims = latent_dim + rope_dim;
    return {format, format, 1, dims, rotary_v ? dims : latent_dim, page_size, false, false, rope_dim};
  }

  /// What a token and KV head consist of. Of a spec that page_layout() accepts.
  constexpr KvSpans spans() const {
    KvSpans s;
    if (is_latent()) {
      const int rotary = latent_dim();
      s.span[0] = {k_format, rotary, false, KvOrder::kRows, 0, 0};
      s.span[1] = {KvFormat{}, rope_dim, false, KvOrder::kRows, rotary, v_dim() > rotary ? rotary : -1};
    } else {
      const auto order = [](const KvFormat& f) {
        return dtype_bits(f.dtype) == 16 ? KvOrder::kRows : KvOrder::kFragments;
      };
      s.span[0] = {k_format, head_dim, rotate_k, order(k_format), 0, -1};
      s.span[1] = {v_format, v_dim(), rotate_v, order(v_format), -1, 0};
    }
    s.count = 2;
    return s;
  }
};

/// Where a span lies within a tile. Offsets are those of the tile's first token.
struct SpanLayout {
  std::int64_t data_bytes = 0;   ///< per tile
  std::int64_t param_bytes = 0;  ///< per tile: scales, then mins if asymmetric
  std::int64_t data_offset = 0;
  std::int64_t param_offset = 0;  ///< params behind the records of a page: of the page
};

/// Sizes and offsets in bytes. A page holds, for each KV head, page_size/16 tiles; a tile of 16 tokens holds
/// K data, V data, K params and V params in this order, each 16-byte aligned. A tile of a latent cache holds
/// 16 records, one per token: each span's codes and its params, each 16-byte aligned; e8m0 scales lie behind
/// all records of the page instead, each token's padded to 8 bytes, and the page is padded to whole records.
/// V's bytes are then those of K: v_data_bytes and v_param_bytes are 0.
struct PageLayout {
  std::int64_t k_data_bytes = 0;    ///< per tile
  std::int64_t v_data_bytes = 0;    ///< per tile
  std::int64_t k_param_bytes = 0;   ///< per tile: scales, then mins if asymmetric
  std::int64_t v_param_bytes = 0;   ///< per tile
  std::int64_t v_data_offset = 0;   ///< within a tile
  std::int64_t k_param_offset = 0;  ///< within a tile
  std::int64_t v_param_offset = 0;  ///< within a tile
  std::int64_t tile_bytes = 0;
  std::int64_t head_bytes = 0;  ///< tile_bytes * page_size / 16: one contiguous (page, head) block
  std::int64_t page_bytes = 0;  ///< head_bytes * kv_heads
  std::int64_t row_bytes = 0;   ///< of a latent cache: from a token's record to the next; else 0
  std::array<SpanLayout, kMaxSpans> spans{};  ///< of KvCacheSpec::spans()
};

/// Validates `spec` and returns its layout. Throws InvalidArgument or Unsupported.
HALFTONE_API PageLayout page_layout(const KvCacheSpec& spec);

/// Bytes that one token occupies over all KV heads, K and V, scales included.
HALFTONE_API double bytes_per_token(const KvCacheSpec& spec);

/// How entries of the block table are treated.
enum class BlockTableMode : std::uint8_t {
  kTrusted,  ///< live entries are known to be valid (the CPU backend still checks them and throws OutOfRange,
             ///< CUDA treats a bad one as kClamped does)
  kClamped,  ///< a live entry outside [0, num_pages) excludes its tokens and sets bit 0 of the status word
};

/// Static scales, f32 [1] (Granularity::kTensor) or f32 [kv_heads] (Granularity::kHead); finite and > 0.
/// `min` is present exactly when the format is asymmetric.
struct StaticScale {
  TensorView scale{};
  TensorView min{};
};

/// What append makes of a channel of K, head h and dim d, before it rotates and quantises, and after RoPE:
/// (k - offset[h][d]) * (1 / scale[h][d]), in this order, each operation rounded to fp32. f32 [kv_heads,
/// head_dim], of at most 2^100 in magnitude and within [2^-16, 2^16]; the same for all tokens of a cache.
struct ChannelTensors {
  TensorView offset{};
  TensorView scale{};
};

/// A view of the caller's cache. All tensors live on one device.
struct PagedKv {
  KvCacheSpec spec{};
  /// uint8 [num_pages, page_bytes]; 16-byte aligned (AlignedBuffer); strides[0] >= page_bytes, a multiple of
  /// 16
  TensorView pages{};
  /// int32 [batch, max_pages_per_request]; entries past a request's length are never read
  TensorView block_table{};
  TensorView lengths{};   ///< int32 [batch]: live tokens of each request
  StaticScale k_scale{};  ///< present exactly when k_format has static scales
  StaticScale v_scale{};
  BlockTableMode table_mode = BlockTableMode::kTrusted;
  ChannelTensors
      k_channels{};  ///< present exactly with KvCacheSpec::offset_k and scale_k; calibrate_channels()
};

/// Which dims a rotary embedding pairs.
enum class RopePairing : std::uint8_t {
  kNone,
  kHalf,         ///< (i, i + rotary_dim/2): GPT-NeoX, Llama in most checkpoints
  kInterleaved,  ///< (2i, 2i + 1): GPT-J, RoFormer (arXiv:2104.09864)
};

/// Rotary position embedding applied to K before it is rotated and quantised. rotary_dim = 2 * cos.shape[1]
/// may be smaller than head_dim; the remaining dims pass through. Of a latent cache the dims counted are the
/// last rope_dim of K, which it may not exceed.
struct Rope {
  RopePairing pairing = RopePairing::kNone;
  TensorView cos{};        ///< f32 [max_position, rotary_dim/2]; at most 2^16 in magnitude, as sin
  TensorView sin{};        ///< f32 [max_position, rotary_dim/2]
  TensorView positions{};  ///< int32 [tokens]: row of cos and sin for each appended token
};

/// New tokens and where they go: exactly one of `slot_mapping` and `cu_seqlens` is present.
struct AppendArgs {
  TensorView k{};             ///< f32, f16 or bf16 [tokens, kv_heads, head_dim]; last dim contiguous
  TensorView v{};             ///< same dtype [tokens, kv_heads, v_dim]; last dim contiguous; absent for a
                              ///< latent cache, whose K has it. K and V must be finite and at most 2^100 in
                              ///< magnitude, so that fp32 arithmetic stays finite
  TensorView slot_mapping{};  ///< int64 [tokens]: page * page_size + offset; negative skips the token
  TensorView cu_seqlens{};    ///< int32 [batch + 1]: tokens [cu[i], cu[i+1]) go to request i at positions
                              ///< lengths[i], lengths[i]+1, ... through block_table
  Rope rope{};
  /// Optional on the CPU, int32 [1] on CUDA: sticky flags. Bit 0: a block-table entry was out of bounds
  /// (kClamped). On CUDA bit 1: a value not finite or beyond 2^100; bit 3: a static scale not finite and
  /// positive, or an offset or scale of a channel beyond its limits; bit 4: a value of V beyond 2,048
  /// (rotated: beyond 2,048 over the root of head_dim's largest power of two) in a format that stores f16
  /// scales, with which attention on CUDA (not on the CPU) may overflow. Give such a V static scales, or
  /// scales in f32 ("-f32").
  TensorView status{};
  /// With cu_seqlens: lengths[i] then grows by cu[i+1] - cu[i], also for tokens that a bad block-table entry
  /// drops. Advance once per step: of layers that share `lengths`, only the last one appended to may, or the
  /// tokens count once for each layer and land in the wrong slots.
  bool advance = false;
  /// A promise, of use in a chain of layers on a CUDA stream: what wrote all that this call reads, except k
  /// and v, and its status had ended before the previous kernel of the stream began. append() then looks up
  /// its slots while that kernel ends, and the next kernel of the stream may begin as early as this one: what
  /// it reads before it waits (AttentionArgs::new_tokens_late) must have been there before that previous
  /// kernel, too.
  bool cache_settled = false;
};

/// Quantises `args.k` and `args.v` and writes them into `cache`: RoPE, then k_channels, then the rotation,
/// then the format. The caller updates `lengths` afterwards,
/// unless `args.advance` is set. Only the bytes of the addressed slots (and lengths) change. With
/// slot_mapping, cache.block_table and cache.lengths may be absent. CPU: throws OutOfRange (slot or page
/// beyond the cache, rope.positions beyond cos), InvalidArgument (K or V not finite or beyond 2^100, cos or
/// sin not finite or beyond 2^16, two tokens with one slot) before any byte is written.
HALFTONE_API void append(const PagedKv& cache, const AppendArgs& args, Stream stream = nullptr);

/// Reads a cache back in the caller's basis (rotations and k_channels undone), request after request.
/// k_out: f32, f16 or bf16 [sum(lengths), kv_heads, head_dim]; v_out likewise with v_dim. Either may be
/// absent. Tokens behind a bad block-table entry are zeros (kClamped) or OutOfRange (kTrusted); on CUDA
/// zeros, as are tokens beyond the table. CUDA also leaves sum(lengths) to the caller, since it lies on the
/// device: rows beyond it become zeros, tokens beyond the rows are left out. There it never allocates or
/// synchronises.
HALFTONE_API void dequantize(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out,
                             Stream stream = nullptr);

/// Static scales (and mins, if asymmetric) that let `x` be stored without clipping.
/// x: f32, f16 or bf16 [tokens, kv_heads, dim] on the CPU, finite and at most 2^100 in magnitude. Returns 1
/// (kTensor) or kv_heads (kHead) values. channels: those of K on the CPU, if the cache treats them.
struct StaticScaleValues {
  std::vector<float> scale{};
  std::vector<float> min{};
};
HALFTONE_API StaticScaleValues calibrate(const TensorView& x, const KvFormat& format, bool rotate = false,
                                         const ChannelTensors& channels = {});

/// An offset and a scale per channel of K, f32 [kv_heads, head_dim] each; empty: best without.
struct ChannelValues {
  std::vector<float> offset{};
  std::vector<float> scale{};
};
/// Offset and scale from sample values of K: the mean of a channel, and the root of its largest distance from
/// that, or from 0 without an offset (SmoothQuant, arXiv:2211.10438, halves the exponent likewise). k: f32,
/// f16 or bf16 [tokens, kv_heads, head_dim] after RoPE on the CPU, finite and at most 2^100 in magnitude.
HALFTONE_API ChannelValues channel_values(const TensorView& k, bool offset, bool scale);
/// Likewise of neither, one or both of them: those with which the logits of the sample, stored in `format`,
/// err least. q: the queries of the sample, f32, f16 or bf16 [queries, q_heads, head_dim], or absent: then
/// every channel counts alike.
HALFTONE_API ChannelValues calibrate_channels(const TensorView& k, const KvFormat& format,
                                              bool rotate = false, const TensorView& q = {});

/// FBGEMM gen_ai INT4 rows: [half2{scale, shift} x groups][nibbles, even dim low], x = q * scale + shift; one
/// row is 4 * groups + dim/2 bytes (68 for dim 128 and one group, 80 for four). The same codes and scales as
/// the native int4-row (groups = 1) and int4-g<dim/groups> formats, so both directions are exact. rows: uint8
/// [tokens, kv_heads, 4 * groups + dim/2]; token t lives in slot `slots[t]` (int64 [tokens], >= 0). `which`
/// selects K or V of the cache, whose format must be asymmetric int4 with f16 scales and as many groups, and
/// which must not be rotated (rotate_k, rotate_v) nor have channels treated (offset_k, scale_k): Unsupported.
/// CPU only. import also throws InvalidArgument on a scale that is negative or not finite; both throw
/// OutOfRange on a slot beyond the cache.
enum class KvPart : std::uint8_t { kK, kV };
HALFTONE_API void import_fbgemm_int4(const PagedKv& cache, KvPart which, const TensorView& rows,
                                     const TensorView& slots);
HALFTONE_API void export_fbgemm_int4(const PagedKv& cache, KvPart which, const TensorView& slots,
                                     const TensorView& rows);

}  // namespace halftone
