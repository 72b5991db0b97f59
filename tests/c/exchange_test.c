/* Calibration and FBGEMM rows through the C ABI. */
#include "fixture.h"

static halftone_kv_format parse(const char* text) {
  halftone_kv_format format;
  CHECK_OK(halftone_kv_format_init(&format, sizeof format));
  CHECK_OK(halftone_kv_format_parse(text, &format));
  return format;
}

static void calibration(void) {
  enum { TOKENS = 3, HEADS = 2, DIM = 64 };
  float x[TOKENS * HEADS * DIM] = {0};
  float scale[2] = {-1, -1}, min[2] = {-1, -1};
  halftone_tensor view = tensor(x, HALFTONE_DTYPE_F32, 3, TOKENS, HEADS, DIM);
  halftone_tensor one = tensor(scale, HALFTONE_DTYPE_F32, 1, 1, 0, 0);
  halftone_tensor two = tensor(scale, HALFTONE_DTYPE_F32, 1, HEADS, 0, 0);
  halftone_tensor mins = tensor(min, HALFTONE_DTYPE_F32, 1, HEADS, 0, 0);
  halftone_kv_format format = parse("int8-tensor");
  x[5] = 2.54f;        /* token 0, head 0 */
  x[DIM + 7] = -5.08f; /* token 0, head 1 */
  CHECK_OK(halftone_calibrate(&view, &format, 0, &one, NULL));
  CHECK(fabsf(scale[0] - 0.04f) < 1e-6f && scale[1] == -1);
  format = parse("int8-static-head");
  CHECK_OK(halftone_calibrate(&view, &format, 0, &two, NULL));
  CHECK(fabsf(scale[0] - 0.02f) < 1e-6f && fabsf(scale[1] - 0.04f) < 1e-6f);
  format = parse("int8-static-head-asym");
  CHECK_OK(halftone_calibrate(&view, &format, 0, &two, &mins));
  CHECK(fabsf(scale[1] - 5.08f / 255) < 1e-6f && min[1] == -5.08f && min[0] == 0);

  scale[0] = scale[1] = -1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "scale|1 elements|[2]",
              halftone_calibrate(&view, &format, 0, &one, &mins));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "min is absent", halftone_calibrate(&view, &format, 0, &two, NULL));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "rotate is 3|0 (no)",
              halftone_calibrate(&view, &format, 3, &two, &mins));
  two.dtype = HALFTONE_DTYPE_INT32;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "scale.dtype is int32|f32",
              halftone_calibrate(&view, &format, 0, &two, &mins));
  two.dtype = HALFTONE_DTYPE_F32;
  format = parse("int8-static-head");
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "min is present|symmetric",
              halftone_calibrate(&view, &format, 0, &two, &mins));
  format = parse("int8-head");
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "int8", halftone_calibrate(&view, &format, 0, &two, NULL));
  CHECK(scale[0] == -1 && scale[1] == -1);
}

/* Rows that C writes by hand are read back as values, and leave as the same bytes. */
static void fbgemm_rows(void) {
  enum { TOKENS = 5, HEADS = 2, DIM = 128, GROUPS = 4, ROW = 4 * GROUPS + DIM / 2, PAGE = 16 };
  static uint8_t rows[TOKENS * HEADS * ROW], back[TOKENS * HEADS * ROW];
  static float k[TOKENS * HEADS * DIM];
  const int64_t slots[TOKENS] = {16, 17, 18, 19, 20};
  int64_t wrong_slots[TOKENS] = {16, 17, 18, 19, 32};
  int32_t table[1] = {1}, lengths[1] = {TOKENS};
  halftone_kv_format format = parse("int4-g32");
  halftone_cache_spec spec;
  halftone_page_layout layout;
  halftone_paged_kv cache;
  halftone_tensor pages, table_view, lengths_view, rows_view, back_view, slots_view, k_view;
  unsigned char* memory;
  uint64_t seed = 9;
  int t, h, g, d, mismatches = 0;
  for (t = 0; t < TOKENS * HEADS; ++t) {
    for (g = 0; g < GROUPS; ++g) {
      const uint16_t scale = (uint16_t)(0x2c00 + t * 16 + g); /* about 1/16 */
      const uint16_t shift = (uint16_t)(0xbc00 + t * 32 + g); /* about -1 */
      memcpy(rows + t * ROW + 4 * g, &scale, 2);
      memcpy(rows + t * ROW + 4 * g + 2, &shift, 2);
    }
    for (d = 0; d < DIM / 2; ++d) rows[t * ROW + 4 * GROUPS + d] = (uint8_t)(int)(next_random(&seed) * 127);
  }
  CHECK_OK(halftone_cache_spec_init(&spec, sizeof spec));
  spec.kv_heads = HEADS;
  spec.head_dim = DIM;
  spec.page_size = PAGE;
  spec.k_format = &format;
  CHECK_OK(halftone_page_layout_init(&layout, sizeof layout));
  CHECK_OK(halftone_cache_page_layout(&spec, &layout));
  memory = (unsigned char*)allocate((size_t)(2 * layout.page_bytes));
  pages = tensor(memory, HALFTONE_DTYPE_UINT8, 2, 2, layout.page_bytes, 0);
  table_view = tensor(table, HALFTONE_DTYPE_INT32, 2, 1, 1, 0);
  lengths_view = tensor(lengths, HALFTONE_DTYPE_INT32, 1, 1, 0, 0);
  rows_view = tensor(rows, HALFTONE_DTYPE_UINT8, 3, TOKENS, HEADS, ROW);
  back_view = tensor(back, HALFTONE_DTYPE_UINT8, 3, TOKENS, HEADS, ROW);
  slots_view = tensor((void*)(uintptr_t)slots, HALFTONE_DTYPE_INT64, 1, TOKENS, 0, 0);
  CHECK_OK(halftone_paged_kv_init(&cache, sizeof cache));
  cache.spec = &spec;
  cache.pages = &pages;
  cache.block_table = &table_view;
  cache.lengths = &lengths_view;
  CHECK_OK(halftone_import_fbgemm_int4(&cache, HALFTONE_PART_K, &rows_view, &slots_view));
  CHECK_OK(halftone_import_fbgemm_int4(&cache, HALFTONE_PART_V, &rows_view, &slots_view));
  CHECK_OK(halftone_export_fbgemm_int4(&cache, HALFTONE_PART_V, &slots_view, &back_view));
  CHECK(memcmp(rows, back, sizeof rows) == 0);
  k_view = tensor(k, HALFTONE_DTYPE_F32, 3, TOKENS, HEADS, DIM);
  CHECK_OK(halftone_dequantize(&cache, &k_view, NULL, NULL));
  for (t = 0; t < TOKENS; ++t) {
    for (h = 0; h < HEADS; ++h) {
      const uint8_t* row = rows + (t * HEADS + h) * ROW;
      for (d = 0; d < DIM; ++d) {
        const int code = row[4 * GROUPS + d / 2] >> (d % 2 * 4) & 15;
        uint16_t scale, shift;
        memcpy(&scale, row + d / 32 * 4, 2);
        memcpy(&shift, row + d / 32 * 4 + 2, 2);
        if (fabs(code * f16_value(scale) + f16_value(shift) - k[(t * HEADS + h) * DIM + d]) > 1e-6)
          ++mismatches;
      }
    }
  }
  CHECK(mismatches == 0);

  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "part is 2|halftone_kv_part",
              halftone_import_fbgemm_int4(&cache, 2, &rows_view, &slots_view));
  slots_view.data = wrong_slots;
  CHECK_ERROR(HALFTONE_OUT_OF_RANGE, "slots|32|31",
              halftone_import_fbgemm_int4(&cache, HALFTONE_PART_K, &rows_view, &slots_view));
  free(memory);
}

int main(void) {
  calibration();
  fbgemm_rows();
  return check_report("exchange_test");
}
