/* One decode step over an INT8 cache: docs/c-api.md walks through it. */
#include <halftone/halftone.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, Q_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 128, PAGE_SIZE = 64, PAGES = 8, TOKENS = 100 };

#define TRY(call)                                                                       \
  do {                                                                                  \
    const halftone_status status = (call);                                              \
    if (status != HALFTONE_OK) {                                                        \
      fprintf(stderr, "%s: %s\n", halftone_status_name(status), halftone_last_error()); \
      exit(1);                                                                          \
    }                                                                                   \
  } while (0)

static halftone_tensor view(void* data, int32_t dtype, int32_t rank, int64_t a, int64_t b, int64_t c) {
  const int64_t shape[3] = {a, b, c};
  halftone_tensor tensor;
  TRY(halftone_tensor_init(&tensor, sizeof tensor, data, dtype, rank, shape));
  return tensor;
}

static float* random_floats(size_t count) {
  float* x = malloc(count * sizeof *x);
  if (x == NULL) exit(1);
  for (size_t i = 0; i < count; ++i) x[i] = (float)rand() / (float)RAND_MAX * 2 - 1;
  return x;
}

int main(void) {
  /* The cache: its format, the size of a page, and memory for the pages. */
  halftone_kv_format format;
  TRY(halftone_kv_format_init(&format, sizeof format));
  TRY(halftone_kv_format_parse("int8-head", &format));
  halftone_cache_spec spec;
  TRY(halftone_cache_spec_init(&spec, sizeof spec));
  spec.k_format = &format; /* V follows K */
  spec.kv_heads = KV_HEADS;
  spec.head_dim = HEAD_DIM;
  spec.page_size = PAGE_SIZE;
  halftone_page_layout layout;
  TRY(halftone_page_layout_init(&layout, sizeof layout));
  TRY(halftone_cache_page_layout(&spec, &layout));
  void* memory = aligned_alloc(256, (size_t)((PAGES * layout.page_bytes + 255) / 256 * 256));
  if (memory == NULL) return 1;

  /* Two requests of up to four pages; their lengths grow with every append. */
  int32_t table[BATCH][PAGES / BATCH] = {{0, 2, 4, 6}, {1, 3, 5, 7}};
  int32_t lengths[BATCH] = {0, 0};
  halftone_tensor pages = view(memory, HALFTONE_DTYPE_UINT8, 2, PAGES, layout.page_bytes, 0);
  halftone_tensor block_table = view(table, HALFTONE_DTYPE_INT32, 2, BATCH, PAGES / BATCH, 0);
  halftone_tensor length_view = view(lengths, HALFTONE_DTYPE_INT32, 1, BATCH, 0, 0);
  halftone_paged_kv cache;
  TRY(halftone_paged_kv_init(&cache, sizeof cache));
  cache.spec = &spec;
  cache.pages = &pages;
  cache.block_table = &block_table;
  cache.lengths = &length_view;

  /* Quantise and append the keys and values of 100 tokens: 60 of the first request, 40 of the second. */
  float* k = random_floats(TOKENS * KV_HEADS * HEAD_DIM);
  float* v = random_floats(TOKENS * KV_HEADS * HEAD_DIM);
  int32_t cu[BATCH + 1] = {0, 60, TOKENS};
  halftone_tensor k_view = view(k, HALFTONE_DTYPE_F32, 3, TOKENS, KV_HEADS, HEAD_DIM);
  halftone_tensor v_view = view(v, HALFTONE_DTYPE_F32, 3, TOKENS, KV_HEADS, HEAD_DIM);
  halftone_tensor cu_view = view(cu, HALFTONE_DTYPE_INT32, 1, BATCH + 1, 0, 0);
  halftone_append_args append;
  TRY(halftone_append_args_init(&append, sizeof append));
  append.k = &k_view;
  append.v = &v_view;
  append.cu_seqlens = &cu_view;
  append.advance = 1; /* adds the tokens to `lengths`, too */
  TRY(halftone_append(&cache, &append, NULL));

  /* Plan once per shape. */
  halftone_attention_problem problem;
  TRY(halftone_attention_problem_init(&problem, sizeof problem));
  problem.batch = BATCH;
  problem.kv = &spec;
  problem.q_heads = Q_HEADS;
  problem.max_kv_len = PAGES / BATCH * PAGE_SIZE;
  problem.q_dtype = problem.out_dtype = HALFTONE_DTYPE_F32;
  halftone_plan* plan = NULL;
  TRY(halftone_plan_create(&problem, &plan));
  size_t workspace_bytes = 0;
  TRY(halftone_plan_workspace_bytes(plan, &workspace_bytes));
  void* scratch = aligned_alloc(256, (workspace_bytes + 255) / 256 * 256);
  if (scratch == NULL) return 1;
  halftone_tensor workspace = view(scratch, HALFTONE_DTYPE_UINT8, 1, (int64_t)workspace_bytes, 0, 0);

  /* Schedule once per step, run once per layer. */
  halftone_sequence_lengths step;
  TRY(halftone_sequence_lengths_init(&step, sizeof step));
  step.kv_lengths = &length_view;
  TRY(halftone_schedule(plan, &step, &workspace, NULL));
  float* q = random_floats(BATCH * Q_HEADS * HEAD_DIM);
  float* out = random_floats(BATCH * Q_HEADS * HEAD_DIM);
  halftone_tensor q_view = view(q, HALFTONE_DTYPE_F32, 3, BATCH, Q_HEADS, HEAD_DIM);
  halftone_tensor out_view = view(out, HALFTONE_DTYPE_F32, 3, BATCH, Q_HEADS, HEAD_DIM);
  halftone_attention_args args;
  TRY(halftone_attention_args_init(&args, sizeof args));
  args.q = &q_view;
  args.out = &out_view;
  args.cache = &cache;
  TRY(halftone_run(plan, &args, &workspace, NULL));
  printf("halftone %s: out[0][0] = %.4f %.4f %.4f ...\n", halftone_version(), (double)out[0], (double)out[1],
         (double)out[2]);

  TRY(halftone_plan_destroy(plan));
  free(out);
  free(q);
  free(scratch);
  free(v);
  free(k);
  free(memory);
  return 0;
}
