// What a user writes first: five lines against the installed headers and library.
#include <halftone/attention.h>
#include <halftone/cache.h>

#include <cstdio>

int main() {
  const halftone::KvFormat format = halftone::parse_format("int4-g32");
  const halftone::KvCacheSpec spec{.k_format = format, .v_format = format, .kv_heads = 8, .head_dim = 128};
  const double bytes = halftone::bytes_per_token(spec);
  std::printf("%s: %g bytes per token\n", halftone::format_name(format).c_str(), bytes);
  return bytes == 2 * 8 * (128 / 2 + 128 / 32 * 4) ? 0 : 1;
}
