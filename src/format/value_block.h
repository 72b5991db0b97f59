// Blocks of V as Arithmetic::kFullInt8 and kFp8 take them: codes of 8 bits with a scale per channel.
//
// A block is kTokens tokens of one request and KV head, counted from the request's first token: token t is of
// block t / kTokens, whatever page it lies in. A channel is one dim of V over the block's counted tokens; it
// is quantised by the rule of a row: int8_row.h or fp8_row.h. Counted are live tokens (t < kv_len) that some
// query of the request may see, from first_counted() on, so that pages which a window has passed may be
// anything; and none behind a bad entry of the block table.
#pragma once

#include <cstdint>

#include "format/fp8_row.h"
#include "format/host_device.h"
#include "format/int8_row.h"

namespace halftone::value_block {

inline constexpr int kTokens = 128;

/// The first token that some query of the request may see: its first query stands at kv_len - q_len.
/// `window_left` as in Mask, -1: unlimited.
HT_HOST_DEVICE inline std::int64_t first_counted(std::int64_t kv_len, std::int64_t q_len,
                                                 std::int64_t window_left) {
  const std::int64_t first = kv_len - q_len - window_left;
  return window_left < 0 || first < 0 ? 0 : first;
}

/// x is about code * scale with code = rint(x * inverse), ties to even, of a channel whose largest magnitude
/// has these bits.
HT_HOST_DEVICE inline int8_row::Row int8_channel(std::uint32_t largest) { return int8_row::row_of(largest); }

/// The same with codes of E4M3 (fp8_row::code_of). Where V has a symmetric static scale, x is its code, and
/// the static scale multiplies O at the end: codes of E4M3, up to 448, then stay what they are.
HT_HOST_DEVICE inline fp8_row::Row fp8_channel(std::uint32_t largest) { return fp8_row::row_of(largest); }

}  // namespace halftone::value_block
