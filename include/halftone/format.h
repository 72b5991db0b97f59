// A KV-cache number format as data.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "halftone/types.h"

namespace halftone {

/// What shares one quantisation scale.
enum class Granularity : std::uint8_t {
  kNone,       ///< 16-bit formats: no scale
  kTensor,     ///< one static scale for the whole cache, supplied by the caller
  kHead,       ///< one static scale per KV head, supplied by the caller
  kToken,      ///< one scale per token, shared by all its KV heads, computed by append
  kTokenHead,  ///< one scale per token and KV head, computed by append
  kGroup,  ///< one scale per group of `group_size` consecutive dims of a token and head, computed by append
};

/// Describes how K or V values are stored. Symmetric: x = q * scale. Asymmetric: x = q * scale + min with q
/// >= 0.
///
/// Codes: int8 is two's complement in [-127, 127] (symmetric) or unsigned in [0, 255] (asymmetric); int4 is
/// unsigned in [0, 15], symmetric values being stored as q + 8 with q in [-7, 7]; e4m3 is always symmetric.
/// Sources: FBGEMM gen_ai KV-cache quantisation (asymmetric int4, row- and group-wise), KVQuant
/// (arXiv:2401.18079) and KIVI (arXiv:2402.02750) for granularities, OCP OFP8 for e4m3.
struct KvFormat {
  DType dtype = DType::kBFloat16;
  Granularity granularity = Granularity::kNone;
  bool asymmetric = false;
  int group_size = 0;                   ///< 32, 64 or 128 with Granularity::kGroup, else 0
  DType scale_dtype = DType::kFloat16;  ///< kFloat16 or kFloat32; static scales are always kFloat32. Groups
                                        ///< of e4m3 in a latent cache: kFloat8E8M0, too, rounded up

  friend constexpr bool operator==(const KvFormat&, const KvFormat&) = default;

  constexpr bool quantised() const { return granularity != Granularity::kNone; }
  /// True when scales come from the caller and are not stored in the pages.
  constexpr bool static_scale() const {
    return granularity == Granularity::kTensor || granularity == Granularity::kHead;
  }
  /// True when append computes the scales and stores them in the pages.
  constexpr bool dynamic_scale() const { return quantised() && !static_scale(); }
  /// Scales stored per token and head in a page: head_dim / group_size, 1, or 0.
  constexpr int params_per_token(int head_dim) const {
    if (!dynamic_scale()) return 0;
    return granularity == Granularity::kGroup ? head_dim / group_size : 1;
  }
};

struct NamedFormat {
  std::string_view name{};
  KvFormat format{};
  std::string_view description{};  ///< one line for tables and help
};

/// The formats that have a name of their own, in order of falling size:
/// bf16 fp16 fp8 fp8-static-head fp8-token-head int8-tensor int8-token int8-head int8-g32 int8-g64 int8-g128
/// int4-g32 int4-g64 int4-g128 int4-row.
HALFTONE_API std::span<const NamedFormat> named_formats();

/// Parses a named format, or the general form
/// `bf16 | fp16 |
/// (fp8|int8|int4)-(tensor|static-head|token|token-head|g32|g64|g128)[-sym|-asym][-f16|-f32|-e8m0]`; the
/// defaults are symmetric for fp8 and int8, asymmetric for int4, and f16 scales. "static-tensor" is the same
/// as "tensor", and until version 0.2 "fp8-head" the same as "fp8-static-head". Throws InvalidArgument naming
/// the formats that are nearest in meaning.
HALFTONE_API KvFormat parse_format(std::string_view text);

/// The shortest text that parse_format turns back into `format`.
HALFTONE_API std::string format_name(const KvFormat& format);

/// Throws InvalidArgument or Unsupported unless `format` can store vectors of `head_dim` values. `argument`
/// names the format in the sentence, e.g. "k_format".
HALFTONE_API void check_format(const KvFormat& format, int head_dim, std::string_view argument);

}  // namespace halftone
