// The format parser: any text, and any KvFormat built from bytes.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fuzz_input.h"
#include "halftone/cache.h"
#include "halftone/format.h"

namespace {

using namespace halftone;
using fuzz::require;

/// A format that the library accepts has a name that gives it back, and geometry without overflow.
void check_accepted(const KvFormat& format) {
  const std::string name = format_name(format);
  require(parse_format(name) == format, "format_name is inverted by parse_format");
  require(name.size() < 40, "names are short");
  for (const int dim : {64, 80, 96, 128, 192, 256, 512}) {
    if (!fuzz::accepted([&] { check_format(format, dim, "format"); })) continue;
    KvCacheSpec spec;
    spec.k_format = spec.v_format = format;
    spec.kv_heads = 3;
    spec.head_dim = dim;
    const PageLayout layout = page_layout(spec);
    require(layout.page_bytes == 3 * layout.head_bytes && layout.tile_bytes % 16 == 0,
            "pages are whole tiles");
    require(layout.v_param_offset + layout.v_param_bytes == layout.tile_bytes, "a tile has no slack");
    const double expected = static_cast<double>(layout.page_bytes) / spec.page_size;
    require(bytes_per_token(spec) == expected, "bytes_per_token is a page's share");
  }
}

void parse_text(std::string_view text) {
  KvFormat format;
  if (!fuzz::accepted([&] { format = parse_format(text); })) return;
  const bool old_name = text == "fp8-head";  // never printed, since head says that append computes the scales
  require(old_name || format_name(format).size() <= text.size(), "format_name gives the shortest text");
  check_accepted(format);
}

void build_from_bytes(fuzz::Input in) {
  KvFormat format;
  format.dtype = static_cast<DType>(in.take<std::uint8_t>() % 12);
  format.granularity = static_cast<Granularity>(in.take<std::uint8_t>() % 8);
  format.asymmetric = in.flag();
  format.group_size = in.flag() ? in.take<std::int32_t>() : 32 << in.range(0, 3);
  if (format.granularity != Granularity::kGroup && in.flag()) format.group_size = 0;
  format.scale_dtype = static_cast<DType>(in.take<std::uint8_t>() % 12);
  const int head_dim = in.flag() ? in.take<std::int32_t>() : 128;
  if (fuzz::accepted([&] { check_format(format, head_dim, "format"); })) check_accepted(format);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  parse_text({reinterpret_cast<const char*>(data), size});
  build_from_bytes(fuzz::Input(data, size));
  return 0;
}
