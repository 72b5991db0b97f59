/* The same program through the C ABI. */
#include <halftone/halftone.h>
#include <stdio.h>

int main(void) {
  halftone_kv_format format;
  halftone_cache_spec spec;
  double bytes = 0;
  if (halftone_kv_format_init(&format, sizeof format) || halftone_cache_spec_init(&spec, sizeof spec))
    return 1;
  if (halftone_kv_format_parse("int4-g32", &format)) return 1;
  spec.k_format = spec.v_format = &format;
  spec.kv_heads = 8;
  spec.head_dim = 128;
  if (halftone_cache_bytes_per_token(&spec, &bytes)) {
    fprintf(stderr, "%s\n", halftone_last_error());
    return 1;
  }
  printf("halftone %s: %g bytes per token\n", halftone_version(), bytes);
  return bytes == 2 * 8 * (128 / 2 + 128 / 32 * 4) ? 0 : 1;
}
