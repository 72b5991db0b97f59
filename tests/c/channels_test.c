/* Offset and scale of K's channels through the C ABI: calibration, append, dequantize, errors. */
#include "fixture.h"

enum { TOKENS = 64, HEADS = 2, DIM = 64, PAGE = 64 };

static void k_with_a_bias(float* k) {
  int i;
  fill_random(k, TOKENS * HEADS * DIM, 7);
  for (i = 0; i < TOKENS * HEADS * DIM; ++i) {
    if (i % DIM == 9) k[i] += 40;
  }
}

static double error_of(const float* a, const float* b) {
  double sum = 0;
  int i;
  for (i = 0; i < TOKENS * HEADS * DIM; ++i) sum += (a[i] - b[i]) * (double)(a[i] - b[i]);
  return sqrt(sum);
}

/* Appends and reads back: the error of K. */
static double stored_error(const halftone_cache_spec* spec, float* k, const halftone_tensor* offset,
                           const halftone_tensor* scale) {
  static float back[TOKENS * HEADS * DIM];
  int32_t table[1] = {0}, lengths[1] = {TOKENS}, cu[2] = {0, TOKENS}, none[1] = {0};
  halftone_page_layout layout;
  halftone_paged_kv cache;
  halftone_append_args args;
  halftone_tensor pages, table_view, lengths_view, none_view, k_view, cu_view, out;
  uint8_t* memory;
  CHECK_OK(halftone_page_layout_init(&layout, sizeof layout));
  CHECK_OK(halftone_cache_page_layout(spec, &layout));
  memory = (uint8_t*)allocate((size_t)layout.page_bytes);
  pages = tensor(memory, HALFTONE_DTYPE_UINT8, 2, 1, layout.page_bytes, 0);
  table_view = tensor(table, HALFTONE_DTYPE_INT32, 2, 1, 1, 0);
  lengths_view = tensor(lengths, HALFTONE_DTYPE_INT32, 1, 1, 0, 0);
  none_view = tensor(none, HALFTONE_DTYPE_INT32, 1, 1, 0, 0);
  k_view = tensor(k, HALFTONE_DTYPE_F32, 3, TOKENS, HEADS, DIM);
  cu_view = tensor(cu, HALFTONE_DTYPE_INT32, 1, 2, 0, 0);
  out = tensor(back, HALFTONE_DTYPE_F32, 3, TOKENS, HEADS, DIM);
  CHECK_OK(halftone_paged_kv_init(&cache, sizeof cache));
  CHECK(cache.k_offset == NULL && cache.k_channel_scale == NULL);
  cache.spec = spec;
  cache.pages = &pages;
  cache.block_table = &table_view;
  cache.lengths = &none_view;
  cache.k_offset = offset;
  cache.k_channel_scale = scale;
  CHECK_OK(halftone_append_args_init(&args, sizeof args));
  args.k = args.v = &k_view;
  args.cu_seqlens = &cu_view;
  CHECK_OK(halftone_append(&cache, &args, NULL));
  cache.lengths = &lengths_view;
  CHECK_OK(halftone_dequantize(&cache, &out, NULL, NULL));
  if (offset != NULL) {
    cache.k_offset = NULL;
    CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "cache.k_channels.offset is absent|offset_k",
                halftone_dequantize(&cache, &out, NULL, NULL));
  }
  free(memory);
  return error_of(k, back);
}

int main(void) {
  static float k[TOKENS * HEADS * DIM], offset[HEADS * DIM], scale[HEADS * DIM];
  int32_t offset_k = 7, scale_k = 7;
  int i;
  halftone_kv_format format;
  halftone_cache_spec spec;
  halftone_tensor k_view, offset_view, scale_view, small;
  double with, without;
  CHECK_OK(halftone_kv_format_init(&format, sizeof format));
  CHECK_OK(halftone_kv_format_parse("int4-row", &format));
  CHECK_OK(halftone_cache_spec_init(&spec, sizeof spec));
  CHECK(spec.offset_k == 0 && spec.scale_k == 0);
  spec.kv_heads = HEADS;
  spec.head_dim = DIM;
  spec.page_size = PAGE;
  spec.k_format = &format;
  k_with_a_bias(k);
  k_view = tensor(k, HALFTONE_DTYPE_F32, 3, TOKENS, HEADS, DIM);
  offset_view = tensor(offset, HALFTONE_DTYPE_F32, 2, HEADS, DIM, 0);
  scale_view = tensor(scale, HALFTONE_DTYPE_F32, 2, HEADS, DIM, 0);
  small = tensor(scale, HALFTONE_DTYPE_F32, 2, HEADS, DIM / 2, 0);
  CHECK_ERROR(
      HALFTONE_INVALID_ARGUMENT, "scale is no contiguous [2, 64]",
      halftone_calibrate_channels(&k_view, &format, 0, NULL, &offset_view, &small, &offset_k, &scale_k));
  CHECK_ERROR(
      HALFTONE_INVALID_ARGUMENT, "scale_k is NULL",
      halftone_calibrate_channels(&k_view, &format, 0, NULL, &offset_view, &scale_view, &offset_k, NULL));
  CHECK_OK(
      halftone_calibrate_channels(&k_view, &format, 0, NULL, &offset_view, &scale_view, &offset_k, &scale_k));
  CHECK(offset_k == 1 && (scale_k == 0 || scale_k == 1));
  CHECK(fabsf(offset[9] - 40) < 0.3f && fabsf(offset[10]) < 0.3f);
  for (i = 0; scale_k == 0 && i < HEADS * DIM; ++i) CHECK(scale[i] == 1.0f);

  without = stored_error(&spec, k, NULL, NULL);
  spec.offset_k = offset_k;
  spec.scale_k = scale_k;
  with = stored_error(&spec, k, &offset_view, scale_k ? &scale_view : NULL);
  CHECK(with < 0.2 * without);
  spec.offset_k = 2;
  {
    double bytes;
    CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "spec.offset_k is 2|0 (no) or 1 (yes)",
                halftone_cache_bytes_per_token(&spec, &bytes));
  }
  return check_report("channels_test");
}
