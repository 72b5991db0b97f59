#include "halftone/cache.h"

#include <fmt/format.h>

#include <algorithm>

#include "format/head_dim.h"
#include "format/page.h"
#include "halftone/error.h"

namespace halftone {
namespace {

[[noreturn]] void invalid(const std::string& sentence) { throw Error(ErrorCode::kInvalidArgument, sentence); }

void check_latent(const KvCacheSpec& spec) {
  if (std::ranges::find(kRopeDims, spec.rope_dim) == kRopeDims.end()) {
    invalid(fmt::format(
        "rope_dim is {}, but must be 32 or 64 for a latent cache, or 0 for K and V apart: use {}.",
        spec.rope_dim, nearest_choice(kRopeDims, spec.rope_dim)));
  }
  if (std::ranges::find(kLatentDims, spec.v_head_dim) == kLatentDims.end()) {
    invalid(fmt::format(
        "v_head_dim is {}, but must be 256 or 512, the dims of the latent, when rope_dim is {}: use {}.",
        spec.v_head_dim, spec.rope_dim, nearest_choice(kLatentDims, spec.v_head_dim)));
  }
  if (spec.head_dim != spec.v_head_dim + spec.rope_dim && spec.head_dim != spec.v_head_dim) {
    invalid(
        fmt::format("head_dim is {}, but K of a latent cache has v_head_dim + rope_dim dims, or as many as V "
                    "if that has the rotary ones: use {}.",
                    spec.head_dim, spec.v_head_dim + spec.rope_dim));
  }
  if (spec.kv_heads != 1) {
    invalid(
        fmt::format("kv_heads is {}, but a latent cache has one KV head, which all query heads share: use 1.",
                    spec.kv_heads));
  }
  if (spec.rotate_k || spec.rotate_v) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} is true, but a latent cache is never rotated: use false.",
                            spec.rotate_k ? "rotate_k" : "rotate_v"));
  }
  if (spec.has_channels()) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} is true, but K of a latent cache is V, too, which has neither: use false.",
                            spec.offset_k ? "offset_k" : "scale_k"));
  }
  check_latent_format(spec.k_format, spec.latent_dim(), "k_format");
  if (spec.v_format != spec.k_format) {
    check_latent_format(spec.v_format, spec.latent_dim(), "v_format");
    invalid(fmt::format(
        "v_format is {}, but V of a latent cache is a part of K, whose k_format is {}: use that for both.",
        format_name(spec.v_format), format_name(spec.k_format)));
  }
}

void check_separate(const KvCacheSpec& spec) {
  if (spec.kv_heads < 1) {
    invalid(
        fmt::format("kv_heads is {}, but must be at least 1: give the number of KV heads.", spec.kv_heads));
  }
  check_head_dim(spec.head_dim, "head_dim");
  if (spec.v_head_dim != 0) check_head_dim(spec.v_head_dim, "v_head_dim");
  check_format(spec.k_format, spec.head_dim, "k_format");
  check_format(spec.v_format, spec.v_dim(), "v_format");
  if (spec.has_channels() && !spec.k_format.quantised()) {
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} is true, but k_format is {}, which does not quantise: use false, or a format of "
                    "8 or 4 bits.",
                    spec.offset_k ? "offset_k" : "scale_k", format_name(spec.k_format)));
  }
}

}  // namespace

PageLayout page_layout(const KvCacheSpec& spec) {
  spec.is_latent() ? check_latent(spec) : check_separate(spec);
  if (std::ranges::find(kPageSizes, spec.page_size) == kPageSizes.end()) {
    invalid(fmt::format("page_size is {}, but must be 16, 32, 64, 128 or 256: use {}.", spec.page_size,
                        nearest_choice(kPageSizes, spec.page_size)));
  }
  return page::layout_of(spec);
}

double bytes_per_token(const KvCacheSpec& spec) {
  return static_cast<double>(page_layout(spec).page_bytes) / spec.page_size;
}

}  // namespace halftone
