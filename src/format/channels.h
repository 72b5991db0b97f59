// Offset and scale of the channels of K: taken off before K is rotated and quantised. Q takes the scale back
// up; of the offset softmax sees one constant per row, which counts in the LSE and beside a sink.
#pragma once

#include <cstdint>

#include "format/codec.h"
#include "format/host_device.h"
#include "halftone/cache.h"

namespace halftone {

/// Those of all KV heads, [kv_heads, dim]; null: without.
struct Channels {
  const float* offset = nullptr;
  const float* scale = nullptr;

  static constexpr float kMinScale = 0x1p-16f, kMaxScale = 0x1p16f;  // K stays finite when it is rotated

  HT_HOST_DEVICE constexpr bool any() const { return offset != nullptr || scale != nullptr; }
  static HT_HOST_DEVICE bool is_offset(float x) { return codec::ht_abs(x) <= codec::kMaxInput; }
  static HT_HOST_DEVICE bool is_scale(float x) { return x >= kMinScale && x <= kMaxScale; }

  /// Value `x` of channel `at` = head * dim + d as the rotation and the codec get it.
  HT_HOST_DEVICE float taken(float x, std::int64_t at) const {
    return codec::ht_mul(codec::ht_sub(x, offset_at(at)), inverse_at(at));
  }
  HT_HOST_DEVICE float offset_at(std::int64_t at) const { return offset != nullptr ? offset[at] : 0.0f; }
  HT_HOST_DEVICE float inverse_at(std::int64_t at) const {
    return scale != nullptr ? codec::inverse_of(scale[at]) : 1.0f;
  }
  /// The same of a value of Q.
  HT_HOST_DEVICE float folded(float q, std::int64_t at) const {
    return scale != nullptr ? codec::ht_mul(q, scale[at]) : q;
  }
  /// What taken() was given, but for quantisation.
  HT_HOST_DEVICE float restored(float x, std::int64_t at) const {
    if (scale != nullptr) x = codec::ht_mul(x, scale[at]);
    if (offset != nullptr) x = codec::ht_add(x, offset[at]);
    return x;
  }
};

/// Those of a validated cache.
inline Channels channels_of(const ChannelTensors& t) {
  return {static_cast<const float*>(t.offset.data), static_cast<const float*>(t.scale.data)};
}

}  // namespace halftone
