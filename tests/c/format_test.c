/* Names, formats and page geometry through the C ABI. */
#include "check.h"

static halftone_kv_format parse(const char* text) {
  halftone_kv_format format;
  CHECK_OK(halftone_kv_format_init(&format, sizeof format));
  CHECK_OK(halftone_kv_format_parse(text, &format));
  return format;
}

static void names(void) {
  char buffer[16] = "untouched";
  size_t length = 0;
  int i;
  CHECK(strcmp(halftone_version(), HALFTONE_VERSION) == 0);
  CHECK(halftone_abi_version() == HALFTONE_ABI_VERSION);
  CHECK(strcmp(halftone_status_name(HALFTONE_OK), "OK") == 0);
  CHECK(strcmp(halftone_status_name(HALFTONE_INVALID_ARGUMENT), "InvalidArgument") == 0);
  CHECK(strcmp(halftone_status_name(HALFTONE_INTERNAL), "Internal") == 0);
  CHECK(strcmp(halftone_status_name(99), "Unknown") == 0);
  CHECK(strcmp(halftone_status_name(-1), "Unknown") == 0);

  CHECK(strcmp(halftone_dtype_name(HALFTONE_DTYPE_BF16), "bf16") == 0);
  CHECK(strcmp(halftone_dtype_name(HALFTONE_DTYPE_E4M3), "e4m3") == 0);
  CHECK(halftone_dtype_name(-1) == NULL);
  CHECK(halftone_dtype_name(HALFTONE_DTYPE_E8M0 + 1) == NULL);
  for (i = 0; i <= HALFTONE_DTYPE_INT64; ++i) CHECK(halftone_dtype_name(i) != NULL);
  CHECK(halftone_dtype_bits(HALFTONE_DTYPE_INT4) == 4);
  CHECK(halftone_dtype_bits(HALFTONE_DTYPE_INT64) == 64);
  CHECK(halftone_dtype_bits(77) == 0);

  CHECK_OK(halftone_device_name(HALFTONE_DEVICE_CPU, 0, NULL, 0, &length));
  CHECK(length == 3);
  CHECK_ERROR(HALFTONE_RESOURCE_EXHAUSTED, "capacity is 3|4 bytes",
              halftone_device_name(HALFTONE_DEVICE_CPU, 0, buffer, 3, &length));
  CHECK(strcmp(buffer, "untouched") == 0);
  CHECK_OK(halftone_device_name(HALFTONE_DEVICE_CPU, 0, buffer, 4, NULL));
  CHECK(strcmp(buffer, "cpu") == 0);
  CHECK_OK(halftone_device_name(HALFTONE_DEVICE_CUDA, 3, buffer, sizeof buffer, &length));
  CHECK(strcmp(buffer, "cuda:3") == 0 && length == 6);
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "device.device_type is 5|0 to 1|halftone_device_type",
              halftone_device_name(5, 0, buffer, sizeof buffer, &length));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "device.device_index is 1|0 on the CPU",
              halftone_device_name(HALFTONE_DEVICE_CPU, 1, buffer, sizeof buffer, &length));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "buffer is NULL|capacity is 9",
              halftone_device_name(HALFTONE_DEVICE_CPU, 0, NULL, 9, &length));
}

static void named_formats(void) {
  const size_t count = halftone_named_format_count();
  size_t i;
  int seen_int4 = 0;
  CHECK(count == 15);
  for (i = 0; i < count; ++i) {
    halftone_kv_format listed, parsed;
    const char* name = NULL;
    const char* description = NULL;
    char text[64];
    CHECK_OK(halftone_kv_format_init(&listed, sizeof listed));
    CHECK_OK(halftone_named_format_get(i, &listed, &name, &description));
    CHECK(name != NULL && description != NULL && description[0] != '\0');
    parsed = parse(name);
    CHECK(memcmp(&listed, &parsed, sizeof listed) == 0);
    CHECK_OK(halftone_kv_format_name(&listed, text, sizeof text, NULL));
    CHECK(strcmp(text, name) == 0);
    CHECK_OK(halftone_kv_format_check(&listed, 128, NULL));
    if (strcmp(name, "int4-g32") == 0) seen_int4 = 1;
  }
  CHECK(seen_int4);
  CHECK_OK(halftone_named_format_get(0, NULL, NULL, NULL));
  CHECK_ERROR(HALFTONE_OUT_OF_RANGE, "index is 15|use 0 to 14",
              halftone_named_format_get(count, NULL, NULL, NULL));
}

static void parsing(void) {
  halftone_kv_format format = parse("int4-g32");
  halftone_kv_format before;
  CHECK(format.dtype == HALFTONE_DTYPE_INT4);
  CHECK(format.granularity == HALFTONE_GRANULARITY_GROUP);
  CHECK(format.asymmetric == 1);
  CHECK(format.group_size == 32);
  CHECK(format.scale_dtype == HALFTONE_DTYPE_F16);

  format = parse("int8-token-head-f32");
  CHECK(format.dtype == HALFTONE_DTYPE_INT8 && format.granularity == HALFTONE_GRANULARITY_TOKEN_HEAD);
  CHECK(format.asymmetric == 0 && format.scale_dtype == HALFTONE_DTYPE_F32);

  before = format;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "int4-g33", halftone_kv_format_parse("int4-g33", &format));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "int8-head", halftone_kv_format_parse("int8-haed", &format));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "text is NULL", halftone_kv_format_parse(NULL, &format));
  CHECK(memcmp(&before, &format, sizeof format) == 0);

  format = parse("int4-g128");
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "k_format|64", halftone_kv_format_check(&format, 64, "k_format"));
  format.granularity = 6;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "k_format.granularity is 6|0 to 5|halftone_granularity",
              halftone_kv_format_check(&format, 128, "k_format"));
}

static void geometry(void) {
  const halftone_kv_format int4 = parse("int4-g32");
  const halftone_kv_format int8 = parse("int8-head");
  halftone_cache_spec spec;
  halftone_page_layout layout, before;
  double bytes = 0;
  CHECK_OK(halftone_cache_spec_init(&spec, sizeof spec));
  CHECK(spec.page_size == 64 && spec.v_head_dim == 0 && spec.k_format == NULL && spec.rotate_k == 0);
  spec.kv_heads = 8;
  spec.head_dim = 128;
  CHECK_OK(halftone_page_layout_init(&layout, sizeof layout));

  /* No format: bf16 for both, 256 bytes per token, head and part. */
  CHECK_OK(halftone_cache_page_layout(&spec, &layout));
  CHECK(layout.page_bytes == 64 * 8 * 2 * 256);
  CHECK_OK(halftone_cache_bytes_per_token(&spec, &bytes));
  CHECK(bytes == 8 * 512);

  /* K int4-g32: 64 bytes of nibbles and 4 (scale, min) pairs; V int8-head: 128 bytes and one scale. */
  spec.k_format = &int4;
  spec.v_format = &int8;
  CHECK_OK(halftone_cache_page_layout(&spec, &layout));
  CHECK(layout.k_data_bytes == 16 * 64);
  CHECK(layout.v_data_bytes == 16 * 128);
  CHECK(layout.k_param_bytes == 16 * 4 * 4);
  CHECK(layout.v_param_bytes == 16 * 2);
  CHECK(layout.v_data_offset == layout.k_data_bytes);
  CHECK(layout.k_param_offset == layout.v_data_offset + layout.v_data_bytes);
  CHECK(layout.v_param_offset == layout.k_param_offset + layout.k_param_bytes);
  CHECK(layout.tile_bytes == 16 * (64 + 128 + 16 + 2));
  CHECK(layout.head_bytes == 4 * layout.tile_bytes);
  CHECK(layout.page_bytes == 8 * layout.head_bytes);
  CHECK_OK(halftone_cache_bytes_per_token(&spec, &bytes));
  CHECK(bytes == 8 * (64 + 128 + 16 + 2));

  /* V follows K when only K's format is given. */
  spec.v_format = NULL;
  CHECK_OK(halftone_cache_page_layout(&spec, &layout));
  CHECK(layout.v_data_bytes == 16 * 64);

  before = layout;
  spec.page_size = 48;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "page_size|48|64", halftone_cache_page_layout(&spec, &layout));
  spec.page_size = 64;
  spec.head_dim = 59;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "head_dim|59|64", halftone_cache_page_layout(&spec, &layout));
  spec.head_dim = 128;
  spec.kv_heads = 0;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "kv_heads|0|1", halftone_cache_page_layout(&spec, &layout));
  spec.kv_heads = 8;
  spec.rotate_k = 2;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "spec.rotate_k is 2|0 (no) or 1 (yes)",
              halftone_cache_page_layout(&spec, &layout));
  CHECK(memcmp(&before, &layout, sizeof layout) == 0);
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "bytes is NULL", halftone_cache_bytes_per_token(&spec, NULL));
}

int main(void) {
  CHECK(halftone_last_error()[0] == '\0');
  names();
  named_formats();
  parsing();
  geometry();
  return check_report("format_test");
}
