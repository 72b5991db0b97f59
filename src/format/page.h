// Where every element of a page lives.
//
// A page of one KV head is a row of tiles of 16 tokens. A tile is [K data | V data | K params | V params],
// each part 16-byte aligned. 16-bit formats store plain token rows. Packed formats (8 and 4 bits) store the
// order in which the tensor-core fragments of mma.m16n8k16 (and of wgmma with A in registers) consume them,
// so that a lane turns packed words into A fragments without a shuffle:
//
//   K is the A operand of S^T = K Q^T: rows are tokens, the contraction runs over dims. Lane (g, t) of a
//   warp, g = lane / 4 and t = lane % 4, needs tokens g and g + 8. Dims come in blocks of 32 of which lane t
//   owns the 8 consecutive dims 32 b + 8 t + 0..7 (a last block of 16, for head_dim 80, gives it 4). The lane
//   string of (token, t) is its dims in increasing order, packed (4-bit: even dim in the low nibble).
//
//   V is the A operand of O^T = V^T P^T: rows are dims, the contraction runs over tokens. Lane (g, t) needs
//   tokens 2t, 2t+1, 2t+8, 2t+9. Of each block of 32 dims it owns the 4 consecutive dims 32 b + 4 g + 0..3 (2
//   of a block of 16). Its string holds, per block, 32-bit words that pair tokens 2t + 8p (A) and 2t + 8p + 1
//   (B), p = 0, 1:
//     4-bit: word p    = [A: 4 dims in 16 bits | B: 4 dims in 16 bits]
//     int8 : word 2j+p = [A dim 2j, A dim 2j+1, B dim 2j, B dim 2j+1]
//     e4m3 : word 2j+p = [A dim 2j, B dim 2j, A dim 2j+1, B dim 2j+1]   (one cvt.f16x2.e4m3x2 per half)
//     4-bit, block of 16: one word = [2 dims of tokens 2t, 2t+1, 2t+8, 2t+9 in a byte each]
//   Masking a word then leaves f16x2 pairs over the two tokens.
//
//   Strings are cut into chunks of 16 bytes and a rest of 8, 4 and 2; chunk c of all 64 (K) or 32 (V) strings
//   is contiguous, strings in the order (token, t) for K and (g, t) for V. A warp's load of a chunk is
//   conflict-free.
//
// A latent cache has records instead: a token's row holds, span after span, its codes in the order of its
// dims and its params, each 16-byte aligned. Scales of one byte lie behind all records of the page instead.
//
// K params are planes [token][group], V params planes [group][token] of the scale dtype: all scales, then all
// mins. Appending one token writes whole bytes that belong to that token alone.
#pragma once

#include <cstdint>

#include "format/host_device.h"
#include "halftone/cache.h"

namespace halftone::page {

/// Where an element sits within its tile part: byte offset, and the nibble (0 low, 1 high) of a 4-bit
/// element.
struct Place {
  int byte;
  int nibble;
};

/// The element that a place holds.
struct Element {
  int token;
  int dim;
};

/// Strings of `length` bytes, cut into chunks: byte `pos` of string `index` of `count` strings.
HT_HOST_DEVICE constexpr int chunked(int index, int count, int length, int pos) {
  int base = 0;
  for (int chunk = 16; chunk >= 1; chunk /= 2) {
    const int whole = chunk == 16 ? length / 16 : (length / chunk) % 2;
    if (pos < base + whole * chunk) {
      const int c = (pos - base) / chunk;
      return count * (base + c * chunk) + index * chunk + (pos - base) % chunk;
    }
    base += whole * chunk;
  }
  return -1;
}

/// Inverse of chunked().
struct StringByte {
  int index;
  int pos;
};
HT_HOST_DEVICE constexpr StringByte unchunked(int count, int length, int byte) {
  int base = 0;
  for (int chunk = 16; chunk >= 1; chunk /= 2) {
    const int whole = chunk == 16 ? length / 16 : (length / chunk) % 2;
    if (byte < count * (base + whole * chunk)) {
      const int within = byte - count * base;
      const int c = within / (count * chunk);
      return {(within / chunk) % count, base + c * chunk + within % chunk};
    }
    base += whole * chunk;
  }
  return {-1, -1};
}

/// Rows that are `row_bytes` apart: dims in increasing order.
HT_HOST_DEVICE constexpr Place place_in_rows(int bits, int token, int dim, int row_bytes) {
  return {token * row_bytes + dim * bits / 8, bits == 4 ? dim % 2 : 0};
}

/// 16-bit formats: plain token rows.
HT_HOST_DEVICE constexpr Place row_place(int token, int dim, int head_dim) {
  return place_in_rows(16, token, dim, head_dim * 2);
}
HT_HOST_DEVICE constexpr Element row_element(int byte, int head_dim) {
  return {byte / 2 / head_dim, byte / 2 % head_dim};
}

/// Packed K: lane strings over dims.
HT_HOST_DEVICE constexpr Place k_place(int bits, int token, int dim, int head_dim) {
  const int block = dim / 32;
  const int owned = head_dim - block * 32 >= 32 ? 8 : 4;
  const int t = dim % 32 / owned;
  const int element = block * 8 + dim % 32 % owned;
  return {chunked(token * 4 + t, 64, head_dim * bits / 32, element * bits / 8), bits == 4 ? element % 2 : 0};
}
HT_HOST_DEVICE constexpr Element k_element(int bits, Place place, int head_dim) {
  const StringByte s = unchunked(64, head_dim * bits / 32, place.byte);
  const int element = bits == 4 ? s.pos * 2 + place.nibble : s.pos;
  const int block = element / 8;
  const int owned = head_dim - block * 32 >= 32 ? 8 : 4;
  return {s.index / 4, block * 32 + s.index % 4 * owned + element % 8};
}

/// The order of one V word: which layouts pair dims and tokens how.
enum class VOrder : std::uint8_t { kNibbles, kBytes, kPairs };  // int4, int8, e4m3

HT_HOST_DEVICE constexpr VOrder v_order(DType dtype) {
  return dtype == DType::kInt4 ? VOrder::kNibbles : dtype == DType::kInt8 ? VOrder::kBytes : VOrder::kPairs;
}

/// Packed V: lane strings over pairs of tokens.
HT_HOST_DEVICE constexpr Place v_place(VOrder order, int token, int dim, int head_dim) {
  const int bits = order == VOrder::kNibbles ? 4 : 8;
  const int block = dim / 32;
  const int owned = head_dim - block * 32 >= 32 ? 4 : 2;
  const int g = dim % 32 / owned;
  const int d = dim % 32 % owned;
  const int t = token % 8 / 2, pair = token / 8, half = token % 2;
  int pos = block * 2 * bits;  // a block of 32 dims gives a lane 16 elements
  if (order == VOrder::kNibbles) {
    pos += owned == 4 ? pair * 4 + half * 2 + d / 2 : pair * 2 + half;
  } else {
    const int word = d / 2 * 2 + pair;
    pos += word * 4 + (order == VOrder::kBytes ? half * 2 + d % 2 : d % 2 * 2 + half);
  }
  return {chunked(g * 4 + t, 32, head_dim * bits / 16, pos), order == VOrder::kNibbles ? d % 2 : 0};
}
HT_HOST_DEVICE constexpr Element v_element(VOrder order, Place place, int head_dim) {
  const int bits = order == VOrder::kNibbles ? 4 : 8;
  const StringByte s = unchunked(32, head_dim * bits / 16, place.byte);
  const int g = s.index / 4, t = s.index % 4;
  const int block = s.pos / (2 * bits), within = s.pos % (2 * bits);
  const int owned = head_dim - block * 32 >= 32 ? 4 : 2;
  int pair = 0, half = 0, d = 0;
  if (order == VOrder::kNibbles) {
    pair = owned == 4 ? within / 4 : within / 2;
    half = owned == 4 ? within % 4 / 2 : within % 2;
    d = (owned == 4 ? within % 2 * 2 : 0) + place.nibble;
  } else {
    const int word = within / 4, b = within % 4;
    pair = word % 2;
    half = order == VOrder::kBytes ? b / 2 : b % 2;
    d = word / 2 * 2 + (order == VOrder::kBytes ? b % 2 : b / 2);
  }
  return {2 * t + 8 * pair + half, block * 32 + g * owned + d};
}

/// Places for any format.
HT_HOST_DEVICE constexpr Place place_k(DType dtype, int token, int dim, int head_dim) {
  return dtype_bits(dtype) == 16 ? row_place(token, dim, head_dim)
                                 : k_place(dtype_bits(dtype), token, dim, head_dim);
}
HT_HOST_DEVICE constexpr Place place_v(DType dtype, int token, int dim, int head_dim) {
  return dtype_bits(dtype) == 16 ? row_place(token, dim, head_dim)
                                 : v_place(v_order(dtype), token, dim, head_dim);
}

/// Index within a scale (or min) plane.
HT_HOST_DEVICE constexpr int k_param_index(int token, int group, int groups) {
  return token * groups + group;
}
HT_HOST_DEVICE constexpr int v_param_index(int token, int group) { return group * kTileTokens + token; }

/// Whether params of a latent cache lie behind all records of a page.
HT_HOST_DEVICE constexpr bool params_apart(const KvFormat& f) { return f.scale_dtype == DType::kFloat8E8M0; }
/// Then from a token's params to the next token's, in bytes.
HT_HOST_DEVICE constexpr std::int64_t apart_bytes(const KvFormat& f, int dims) {
  return (f.params_per_token(dims) + 7) / 8 * 8;
}

/// Layout of an already validated spec.
HT_HOST_DEVICE constexpr PageLayout layout_of(const KvCacheSpec& spec) {
  constexpr std::int64_t kAlignment = 16;
  const auto take = [](std::int64_t& at, std::int64_t bytes) {
    const std::int64_t offset = (at + kAlignment - 1) / kAlignment * kAlignment;
    at = offset + bytes;
    return offset;
  };
  const KvSpans spans = spec.spans();
  // Tokens whose codes of a span are next to each other, or whose params are.
  const int together = spec.is_latent() ? 1 : kTileTokens;
  PageLayout l;
  std::int64_t end = 0;
  for (int i = 0; i < spans.count; ++i) {
    const KvSpan& span = spans.span[i];
    const KvFormat& f = span.format;
    SpanLayout& s = l.spans[i];
    s.data_bytes = std::int64_t{kTileTokens} * span.dims * dtype_bits(f.dtype) / 8;
    s.param_bytes = std::int64_t{kTileTokens} * f.params_per_token(span.dims) *
                    (dtype_bits(f.scale_dtype) / 8) * (f.asymmetric ? 2 : 1);
    s.data_offset = take(end, s.data_bytes / kTileTokens * together);
    if (spec.is_latent() && !params_apart(f)) s.param_offset = take(end, s.param_bytes / kTileTokens);
    (span.k_first >= 0 ? l.k_data_bytes : l.v_data_bytes) += s.data_bytes;
    (span.k_first >= 0 ? l.k_param_bytes : l.v_param_bytes) += s.param_bytes;
  }
  for (int i = 0; i < spans.count && !spec.is_latent(); ++i) {
    l.spans[i].param_offset = take(end, l.spans[i].param_bytes);
  }
  const int v = spec.is_latent() ? 0 : 1;
  l.v_data_offset = l.spans[v].data_offset;
  l.k_param_offset = l.spans[0].param_offset;
  l.v_param_offset = l.spans[v].param_offset;
  if (spec.is_latent()) l.row_bytes = take(end, 0);
  l.tile_bytes = spec.is_latent() ? l.row_bytes * kTileTokens : end;
  l.head_bytes = l.tile_bytes * (spec.page_size / kTileTokens);
  if (spec.is_latent() && params_apart(spec.k_format)) {
    l.spans[0].param_offset = l.k_param_offset = l.head_bytes;
    const std::int64_t used = l.head_bytes + spec.page_size * apart_bytes(spec.k_format, spec.latent_dim());
    l.head_bytes = (used + l.row_bytes - 1) / l.row_bytes * l.row_bytes;
  }
  l.page_bytes = l.head_bytes * spec.kv_heads;
  return l;
}

/// Byte offset of the tile that holds `token` (0 <= token < page_size) of `head`, from the start of its page.
HT_HOST_DEVICE constexpr std::int64_t tile_offset(const PageLayout& l, int head, int token) {
  return head * l.head_bytes + token / kTileTokens * l.tile_bytes;
}

}  // namespace halftone::page
