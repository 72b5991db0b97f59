/* A latent (MLA) cache through the C ABI: its spec, its layout, append and dequantize. */
#include "fixture.h"

enum { TOKENS = 5, LATENT = 512, ROPE = 64, DIM = LATENT + ROPE, PAGE = 16 };

static halftone_cache_spec latent_spec(const halftone_kv_format* format) {
  halftone_cache_spec spec;
  CHECK_OK(halftone_cache_spec_init(&spec, sizeof spec));
  CHECK(spec.rope_dim == 0);
  spec.page_size = PAGE;
  CHECK_OK(halftone_cache_spec_latent(&spec, format, LATENT, ROPE));
  CHECK(spec.kv_heads == 1 && spec.head_dim == DIM && spec.v_head_dim == LATENT && spec.rope_dim == ROPE);
  CHECK(spec.k_format == format && spec.v_format == format && spec.page_size == PAGE);
  return spec;
}

static halftone_kv_format parse(const char* text) {
  halftone_kv_format format;
  CHECK_OK(halftone_kv_format_init(&format, sizeof format));
  CHECK_OK(halftone_kv_format_parse(text, &format));
  return format;
}

static void tokens_of_656_bytes(void) {
  static float k[TOKENS * DIM], k_back[TOKENS * DIM], v_back[TOKENS * LATENT];
  const int64_t slots[TOKENS] = {16, 17, 18, 19, 20};
  int32_t table[1] = {1}, lengths[1] = {TOKENS};
  const halftone_kv_format format = parse("fp8-g128-f32");
  const halftone_cache_spec spec = latent_spec(&format);
  halftone_page_layout layout;
  halftone_paged_kv cache;
  halftone_append_args args;
  halftone_tensor pages, table_view, lengths_view, k_view, slots_view, k_out, v_out;
  uint8_t* memory;
  double bytes = 0;
  int i, d;
  CHECK_OK(halftone_page_layout_init(&layout, sizeof layout));
  CHECK_OK(halftone_cache_page_layout(&spec, &layout));
  CHECK(layout.row_bytes == 656 && layout.page_bytes == PAGE * 656);
  CHECK_OK(halftone_cache_bytes_per_token(&spec, &bytes));
  CHECK(bytes == 656);

  memory = (uint8_t*)allocate(2 * (size_t)layout.page_bytes);
  fill_random(k, TOKENS * DIM, 7);
  pages = tensor(memory, HALFTONE_DTYPE_UINT8, 2, 2, layout.page_bytes, 0);
  table_view = tensor(table, HALFTONE_DTYPE_INT32, 2, 1, 1, 0);
  lengths_view = tensor(lengths, HALFTONE_DTYPE_INT32, 1, 1, 0, 0);
  k_view = tensor(k, HALFTONE_DTYPE_F32, 3, TOKENS, 1, DIM);
  slots_view = tensor((void*)slots, HALFTONE_DTYPE_INT64, 1, TOKENS, 0, 0);
  CHECK_OK(halftone_paged_kv_init(&cache, sizeof cache));
  cache.spec = &spec;
  cache.pages = &pages;
  cache.block_table = &table_view;
  cache.lengths = &lengths_view;
  CHECK_OK(halftone_append_args_init(&args, sizeof args));
  args.k = &k_view;
  args.slot_mapping = &slots_view;
  CHECK_OK(halftone_append(&cache, &args, NULL));
  args.v = &k_view;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "v is present|latent cache", halftone_append(&cache, &args, NULL));

  k_out = tensor(k_back, HALFTONE_DTYPE_F32, 3, TOKENS, 1, DIM);
  v_out = tensor(v_back, HALFTONE_DTYPE_F32, 3, TOKENS, 1, LATENT);
  CHECK_OK(halftone_dequantize(&cache, &k_out, &v_out, NULL));
  for (i = 0; i < TOKENS; ++i) {
    const uint8_t* token = memory + (PAGE + i) * 656;
    for (d = 0; d < DIM; ++d) {
      CHECK(fabsf(k_back[i * DIM + d] - k[i * DIM + d]) < 0.07f);
      if (d < LATENT) CHECK(v_back[i * LATENT + d] == k_back[i * DIM + d]);
    }
    for (d = 0; d < ROPE; ++d) { /* bf16: the upper half of a float */
      uint32_t bits = 0;
      memcpy((uint8_t*)&bits + 2, token + 528 + 2 * d, 2);
      CHECK(memcmp(&bits, &k_back[i * DIM + LATENT + d], 4) == 0);
    }
  }
  free(memory);
}

static void errors(void) {
  const halftone_kv_format format = parse("fp8-g128-f32"), fixed = parse("fp8");
  halftone_cache_spec spec = latent_spec(&format);
  double bytes = -1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "spec", halftone_cache_spec_latent(NULL, &format, LATENT, ROPE));
  CHECK_OK(halftone_cache_spec_latent(&spec, &format, 500, ROPE));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "v_head_dim is 500|512",
              halftone_cache_bytes_per_token(&spec, &bytes));
  CHECK_OK(halftone_cache_spec_latent(&spec, &format, LATENT, 65));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "rope_dim is 65|use 64",
              halftone_cache_bytes_per_token(&spec, &bytes));
  CHECK_OK(halftone_cache_spec_latent(&spec, &fixed, LATENT, ROPE));
  CHECK_ERROR(HALFTONE_UNSUPPORTED, "k_format is fp8", halftone_cache_bytes_per_token(&spec, &bytes));
  CHECK(bytes == -1);
}

int main(void) {
  tokens_of_656_bytes();
  errors();
  return check_report("latent_test");
}
