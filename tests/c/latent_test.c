/* A latent (MLA) cache through the C ABI: its spec, its layout, append, dequantize, lists of its keys. */
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

/* Two queries over lists of tokens of one latent cache, the second with a list over another one. */
static void listed_keys(void) {
  enum { HEADS = 2, TOKENS = 20, QUERIES = 2, TOP_K = 4, EXTRA = 3 };
  const halftone_kv_format format = parse("bf16");
  halftone_cache_spec spec = latent_spec(&format);
  halftone_attention_problem problem, planned;
  halftone_sequence_lengths lengths;
  halftone_attention_args args;
  halftone_paged_kv caches[2];
  halftone_plan* plan = NULL;
  static float k[2][TOKENS * DIM], q[QUERIES * HEADS * DIM], out[QUERIES * HEADS * LATENT];
  static float own_k[TOP_K + EXTRA][DIM], own_v[TOP_K + EXTRA][LATENT];
  double expected[HEADS * LATENT], lse[HEADS];
  int32_t indices[QUERIES * TOP_K] = {3, -1, 19, 3, 0, 7, 2, 1};
  int32_t counts[QUERIES] = {4, 2}, extra_counts[QUERIES] = {0, 3};
  int32_t extra_indices[QUERIES * EXTRA] = {0, 0, 0, 15, 16, -1};
  int64_t slots[TOKENS];
  uint8_t* memory[2];
  halftone_tensor tensors[12], pages[2];
  size_t i, c;
  int t, d, n;
  for (t = 0; t < TOKENS; ++t) slots[t] = t;
  for (i = 0; i < QUERIES * HEADS * DIM; ++i) q[i] = (float)((int)(i * 37 % 64) - 32) / 32;
  for (c = 0; c < 2; ++c) {
    halftone_append_args append;
    for (i = 0; i < TOKENS * DIM; ++i) k[c][i] = (float)((int)((i * 29 + c * 11) % 128) - 64) / 64; /* bf16 */
    memory[c] = (uint8_t*)allocate(2 * PAGE * 1152);
    CHECK_OK(halftone_paged_kv_init(&caches[c], sizeof caches[c]));
    pages[c] = tensor(memory[c], HALFTONE_DTYPE_UINT8, 2, 2, PAGE * 1152, 0);
    caches[c].spec = &spec;
    caches[c].pages = &pages[c];
    CHECK_OK(halftone_append_args_init(&append, sizeof append));
    tensors[0] = tensor(k[c], HALFTONE_DTYPE_F32, 3, TOKENS, 1, DIM);
    tensors[1] = tensor(slots, HALFTONE_DTYPE_INT64, 1, TOKENS, 0, 0);
    append.k = &tensors[0];
    append.slot_mapping = &tensors[1];
    CHECK_OK(halftone_append(&caches[c], &append, NULL));
  }
  CHECK_OK(halftone_attention_problem_init(&problem, sizeof problem));
  problem.kv = problem.extra = &spec;
  problem.batch = QUERIES;
  problem.q_heads = HEADS;
  problem.q_dtype = problem.out_dtype = HALFTONE_DTYPE_F32;
  problem.top_k = TOP_K;
  problem.extra_top_k = EXTRA;
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_attention_problem_init(&planned, sizeof planned));
  CHECK_OK(halftone_plan_get_problem(plan, &planned));
  CHECK(planned.top_k == TOP_K && planned.extra_top_k == EXTRA && planned.extra->rope_dim == ROPE);
  CHECK_OK(halftone_plan_destroy(plan));

  tensors[2] = tensor(counts, HALFTONE_DTYPE_INT32, 1, QUERIES, 0, 0);
  tensors[3] = tensor(extra_counts, HALFTONE_DTYPE_INT32, 1, QUERIES, 0, 0);
  tensors[4] = tensor(indices, HALFTONE_DTYPE_INT32, 2, QUERIES, TOP_K, 0);
  tensors[5] = tensor(extra_indices, HALFTONE_DTYPE_INT32, 2, QUERIES, EXTRA, 0);
  tensors[6] = tensor(q, HALFTONE_DTYPE_F32, 3, QUERIES, HEADS, DIM);
  tensors[7] = tensor(out, HALFTONE_DTYPE_F32, 3, QUERIES, HEADS, LATENT);
  CHECK_OK(halftone_sequence_lengths_init(&lengths, sizeof lengths));
  lengths.counts = &tensors[2];
  lengths.extra_counts = &tensors[3];
  CHECK_OK(halftone_attention_args_init(&args, sizeof args));
  args.lengths = &lengths;
  args.cache = &caches[0];
  args.extra_cache = &caches[1];
  args.indices = &tensors[4];
  args.extra_indices = &tensors[5];
  args.q = &tensors[6];
  args.out = &tensors[7];
  CHECK_OK(halftone_attend(&problem, &args));
  for (t = 0; t < QUERIES; ++t) {
    reference_problem r = {1, 0, HEADS, 1, DIM, LATENT, 0, -1, 0, 0, NULL, NULL};
    for (c = 0; c < 2; ++c) {
      const int32_t* list = c == 0 ? indices + t * TOP_K : extra_indices + t * EXTRA;
      for (n = 0; n < (c == 0 ? counts : extra_counts)[t]; ++n) {
        if (list[n] < 0) continue;
        for (d = 0; d < DIM; ++d) own_k[r.kv_len][d] = k[c][list[n] * DIM + d];
        for (d = 0; d < LATENT; ++d) own_v[r.kv_len][d] = own_k[r.kv_len][d];
        ++r.kv_len;
      }
    }
    CHECK(r.kv_len == (t == 0 ? 3 : 4));
    r.scale = 1 / sqrt((double)DIM);
    reference_attention(&r, q + t * HEADS * DIM, own_k[0], own_v[0], expected, lse);
    CHECK(largest_error(out + t * HEADS * LATENT, expected, HEADS * LATENT) < 1e-5);
  }
  args.indices = NULL;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "indices is absent|top_k is 4", halftone_attend(&problem, &args));
  for (c = 0; c < 2; ++c) free(memory[c]);
}

int main(void) {
  tokens_of_656_bytes();
  listed_keys();
  errors();
  return check_report("latent_test");
}
