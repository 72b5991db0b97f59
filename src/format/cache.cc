#include "halftone/cache.h"

#include <fmt/format.h>

#include <algorithm>

#include "format/head_dim.h"
#include "format/page.h"
#include "halftone/error.h"

namespace halftone {

PageLayout page_layout(const KvCacheSpec& spec) {
  const auto invalid = [](const std::string& sentence) {
    throw Error(ErrorCode::kInvalidArgument, sentence);
  };
  if (spec.kv_heads < 1) {
    invalid(
        fmt::format("kv_heads is {}, but must be at least 1: give the number of KV heads.", spec.kv_heads));
  }
  check_head_dim(spec.head_dim, "head_dim");
  if (spec.v_head_dim != 0) check_head_dim(spec.v_head_dim, "v_head_dim");
  if (std::ranges::find(kPageSizes, spec.page_size) == kPageSizes.end()) {
    invalid(fmt::format("page_size is {}, but must be 16, 32, 64, 128 or 256: use {}.", spec.page_size,
                        nearest_choice(kPageSizes, spec.page_size)));
  }
  check_format(spec.k_format, spec.head_dim, "k_format");
  check_format(spec.v_format, spec.v_dim(), "v_format");
  return page::layout_of(spec);
}

double bytes_per_token(const KvCacheSpec& spec) {
  return static_cast<double>(page_layout(spec).page_bytes) / spec.page_size;
}

}  // namespace halftone
