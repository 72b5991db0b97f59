/* Append, plan, schedule, run, dequantize and merge through the C ABI against a plain C reference. */
#include "fixture.h"

enum { BATCH = 4, Q_HEADS = 6, KV_HEADS = 2, DIM = 64, V_DIM = 96, PAGE = 16, PAGES = 16, COLUMNS = 6 };
static const int kv_len[BATCH] = {5, 70, 0, 16};
static const int q_len[BATCH] = {1, 4, 2, 3};
enum { TOTAL_KV = 91, TOTAL_Q = 10 };

/* A cache with 91 tokens of four requests, K int8-head and V int4-g32, and everything that reads it. */
typedef struct fixture {
  halftone_kv_format k_format, v_format;
  halftone_cache_spec spec;
  halftone_paged_kv cache;
  halftone_tensor pages_view, table_view, lengths_view;
  unsigned char* pages;
  int32_t table[BATCH * COLUMNS];
  int32_t lengths[BATCH];
  int32_t cu_q[BATCH + 1];
  float k[TOTAL_KV * KV_HEADS * DIM], v[TOTAL_KV * KV_HEADS * V_DIM];
  float k_read[TOTAL_KV * KV_HEADS * DIM], v_read[TOTAL_KV * KV_HEADS * V_DIM];
  float q[TOTAL_Q * Q_HEADS * DIM];
} fixture;

static fixture f;

static void fill_cache(void) {
  int32_t cu[BATCH + 1];
  halftone_page_layout layout;
  halftone_append_args args;
  halftone_tensor k_view, v_view, cu_view;
  int i, page = PAGES - 1;
  CHECK_OK(halftone_kv_format_init(&f.k_format, sizeof f.k_format));
  CHECK_OK(halftone_kv_format_parse("int8-head", &f.k_format));
  CHECK_OK(halftone_kv_format_init(&f.v_format, sizeof f.v_format));
  CHECK_OK(halftone_kv_format_parse("int4-g32", &f.v_format));
  CHECK_OK(halftone_cache_spec_init(&f.spec, sizeof f.spec));
  f.spec.k_format = &f.k_format;
  f.spec.v_format = &f.v_format;
  f.spec.kv_heads = KV_HEADS;
  f.spec.head_dim = DIM;
  f.spec.v_head_dim = V_DIM;
  f.spec.page_size = PAGE;
  CHECK_OK(halftone_page_layout_init(&layout, sizeof layout));
  CHECK_OK(halftone_cache_page_layout(&f.spec, &layout));
  f.pages = (unsigned char*)allocate((size_t)(PAGES * layout.page_bytes));
  f.pages_view = tensor(f.pages, HALFTONE_DTYPE_UINT8, 2, PAGES, layout.page_bytes, 0);
  for (i = 0; i < BATCH * COLUMNS; ++i) f.table[i] = INT32_MAX; /* dead entries are never read */
  for (i = 0; i < BATCH; ++i) {
    int c;
    for (c = 0; c * PAGE < kv_len[i]; ++c) f.table[i * COLUMNS + c] = page--;
    f.lengths[i] = 0;
  }
  f.table_view = tensor(f.table, HALFTONE_DTYPE_INT32, 2, BATCH, COLUMNS, 0);
  f.lengths_view = tensor(f.lengths, HALFTONE_DTYPE_INT32, 1, BATCH, 0, 0);
  CHECK_OK(halftone_paged_kv_init(&f.cache, sizeof f.cache));
  f.cache.spec = &f.spec;
  f.cache.pages = &f.pages_view;
  f.cache.block_table = &f.table_view;
  f.cache.lengths = &f.lengths_view;

  fill_random(f.k, sizeof f.k / sizeof f.k[0], 1);
  fill_random(f.v, sizeof f.v / sizeof f.v[0], 2);
  fill_random(f.q, sizeof f.q / sizeof f.q[0], 3);
  k_view = tensor(f.k, HALFTONE_DTYPE_F32, 3, TOTAL_KV, KV_HEADS, DIM);
  v_view = tensor(f.v, HALFTONE_DTYPE_F32, 3, TOTAL_KV, KV_HEADS, V_DIM);
  cu[0] = f.cu_q[0] = 0;
  for (i = 0; i < BATCH; ++i) {
    cu[i + 1] = cu[i] + kv_len[i];
    f.cu_q[i + 1] = f.cu_q[i] + q_len[i];
  }
  cu_view = tensor(cu, HALFTONE_DTYPE_INT32, 1, BATCH + 1, 0, 0);
  CHECK_OK(halftone_append_args_init(&args, sizeof args));
  args.k = &k_view;
  args.v = &v_view;
  args.cu_seqlens = &cu_view;
  CHECK_OK(halftone_append(&f.cache, &args, NULL));
  for (i = 0; i < BATCH; ++i) CHECK(f.lengths[i] == 0);
  args.struct_size =
      offsetof(halftone_append_args, advance); /* of an older header: what follows is not read */
  args.advance = args.cache_settled = 77;
  CHECK_OK(halftone_append(&f.cache, &args, NULL));
  for (i = 0; i < BATCH; ++i) CHECK(f.lengths[i] == 0);
  args.struct_size = sizeof args;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.advance is 77|0 (no) or 1",
              halftone_append(&f.cache, &args, NULL));
  args.advance = 1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.cache_settled is 77|0 (no) or 1",
              halftone_append(&f.cache, &args, NULL));
  args.cache_settled = 1; /* a promise that changes nothing on the CPU */
  CHECK_OK(halftone_append(&f.cache, &args, NULL));
  for (i = 0; i < BATCH; ++i) CHECK(f.lengths[i] == kv_len[i]);

  /* A table too small for the next token, and a NaN: refused, with no byte changed. */
  {
    unsigned char* before = (unsigned char*)allocate((size_t)(PAGES * layout.page_bytes));
    int64_t slot = (int64_t)PAGES * PAGE;
    float bad[KV_HEADS * V_DIM] = {0};
    halftone_tensor one_k = tensor(bad, HALFTONE_DTYPE_F32, 3, 1, KV_HEADS, DIM);
    halftone_tensor one_v = tensor(bad, HALFTONE_DTYPE_F32, 3, 1, KV_HEADS, V_DIM);
    halftone_tensor slots = tensor(&slot, HALFTONE_DTYPE_INT64, 1, 1, 0, 0);
    memcpy(before, f.pages, (size_t)(PAGES * layout.page_bytes));
    CHECK_OK(halftone_append_args_init(&args, sizeof args));
    args.k = &one_k;
    args.v = &one_v;
    args.slot_mapping = &slots;
    CHECK_ERROR(HALFTONE_OUT_OF_RANGE, "slot_mapping|256|255", halftone_append(&f.cache, &args, NULL));
    slot = 0;
    bad[3] = NAN;
    CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "nan", halftone_append(&f.cache, &args, NULL));
    args.advance = 1;
    CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "advance|slot_mapping", halftone_append(&f.cache, &args, NULL));
    args.slot_mapping = NULL;
    CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "slot_mapping|cu_seqlens", halftone_append(&f.cache, &args, NULL));
    CHECK(memcmp(before, f.pages, (size_t)(PAGES * layout.page_bytes)) == 0);
    free(before);
  }
}

static void read_cache(void) {
  halftone_tensor k_view = tensor(f.k_read, HALFTONE_DTYPE_F32, 3, TOTAL_KV, KV_HEADS, DIM);
  halftone_tensor v_view = tensor(f.v_read, HALFTONE_DTYPE_F32, 3, TOTAL_KV, KV_HEADS, V_DIM);
  double k_error = 0, v_error = 0;
  size_t i;
  CHECK_OK(halftone_dequantize(&f.cache, &k_view, &v_view, NULL));
  for (i = 0; i < sizeof f.k / sizeof f.k[0]; ++i)
    k_error = fmax(k_error, fabs((double)f.k[i] - f.k_read[i]));
  for (i = 0; i < sizeof f.v / sizeof f.v[0]; ++i)
    v_error = fmax(v_error, fabs((double)f.v[i] - f.v_read[i]));
  /* Half a step of codes of values in [-1, 1), and the rounding of f16 scales. */
  CHECK(k_error > 0 && k_error <= 0.5 / 127 + 1e-3);
  CHECK(v_error > 0 && v_error <= 0.5 * 2 / 15 + 2e-3);
  CHECK_OK(halftone_dequantize(&f.cache, NULL, &v_view, NULL));
}

typedef struct options {
  int causal, window_left, policy;
  float softcap;
  int alibi, sinks;
} options;

static void run_and_compare(const options* o) {
  const float slopes[Q_HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f};
  const float sinks[Q_HEADS] = {0.0f, 1.0f, -1.0f, 0.5f, 2.0f, -3.0f};
  static float out[TOTAL_Q * Q_HEADS * V_DIM], again[TOTAL_Q * Q_HEADS * V_DIM], lse[TOTAL_Q * Q_HEADS];
  static double expected[TOTAL_Q * Q_HEADS * V_DIM], expected_lse[TOTAL_Q * Q_HEADS];
  halftone_attention_problem problem;
  halftone_attention_args args;
  halftone_sequence_lengths lengths;
  halftone_plan* plan = NULL;
  halftone_tensor q_view = tensor(f.q, HALFTONE_DTYPE_F32, 3, TOTAL_Q, Q_HEADS, DIM);
  halftone_tensor out_view = tensor(out, HALFTONE_DTYPE_F32, 3, TOTAL_Q, Q_HEADS, V_DIM);
  halftone_tensor lse_view = tensor(lse, HALFTONE_DTYPE_F32, 2, TOTAL_Q, Q_HEADS, 0);
  halftone_tensor cu_view = tensor(f.cu_q, HALFTONE_DTYPE_INT32, 1, BATCH + 1, 0, 0);
  halftone_tensor slope_view = tensor((void*)(uintptr_t)slopes, HALFTONE_DTYPE_F32, 1, Q_HEADS, 0, 0);
  halftone_tensor sink_view = tensor((void*)(uintptr_t)sinks, HALFTONE_DTYPE_F32, 1, Q_HEADS, 0, 0);
  halftone_tensor workspace;
  size_t bytes = 0;
  unsigned char* memory;
  int r, kv = 0;

  CHECK_OK(halftone_attention_problem_init(&problem, sizeof problem));
  problem.batch = BATCH;
  problem.kv = &f.spec;
  problem.q_heads = Q_HEADS;
  problem.max_q_len = 4;
  problem.max_kv_len = 80;
  problem.q_dtype = problem.out_dtype = HALFTONE_DTYPE_F32;
  problem.causal = o->causal;
  problem.window_left = o->window_left;
  problem.softcap = o->softcap;
  problem.alibi = o->alibi;
  problem.sinks = o->sinks;
  problem.lse = 1;
  problem.policy = o->policy;
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_plan_workspace_bytes(plan, &bytes));
  memory = (unsigned char*)allocate(bytes);
  workspace = tensor(memory, HALFTONE_DTYPE_UINT8, 1, (int64_t)bytes, 0, 0);
  CHECK_OK(halftone_sequence_lengths_init(&lengths, sizeof lengths));
  lengths.cu_q = &cu_view;
  lengths.kv_lengths = &f.lengths_view;
  CHECK_OK(halftone_schedule(plan, &lengths, &workspace, NULL));
  memset(out, 0xff, sizeof out);
  memset(lse, 0xff, sizeof lse);
  CHECK_OK(halftone_attention_args_init(&args, sizeof args));
  args.q = &q_view;
  args.out = &out_view;
  args.lengths = &lengths;
  args.cache = &f.cache;
  args.lse = &lse_view;
  if (o->alibi) args.alibi_slopes = &slope_view;
  if (o->sinks) args.sinks = &sink_view;
  CHECK_OK(halftone_run(plan, &args, &workspace, NULL));
  CHECK(memory[bytes] == 0xff && memory[bytes + 255 - bytes % 256] == 0xff);

  for (r = 0; r < BATCH; ++r) {
    const size_t rows = (size_t)f.cu_q[r] * Q_HEADS;
    reference_problem reference = {0};
    reference.q_len = q_len[r];
    reference.kv_len = kv_len[r];
    reference.q_heads = Q_HEADS;
    reference.kv_heads = KV_HEADS;
    reference.dim = DIM;
    reference.v_dim = V_DIM;
    reference.causal = o->causal;
    reference.window_left = o->window_left;
    reference.scale = 1 / sqrt((double)DIM);
    reference.softcap = o->softcap;
    reference.slopes = o->alibi ? slopes : NULL;
    reference.sinks = o->sinks ? sinks : NULL;
    reference_attention(&reference, f.q + rows * DIM, f.k_read + (size_t)kv * KV_HEADS * DIM,
                        f.v_read + (size_t)kv * KV_HEADS * V_DIM, expected + rows * V_DIM,
                        expected_lse + rows);
    kv += kv_len[r];
  }
  CHECK(largest_error(out, expected, TOTAL_Q * Q_HEADS * V_DIM) < 2e-6);
  CHECK(largest_error(lse, expected_lse, TOTAL_Q * Q_HEADS) < 4e-6);

  memcpy(again, out, sizeof out);
  memset(out, 0xff, sizeof out);
  CHECK_OK(halftone_attend(&problem, &args));
  CHECK(memcmp(again, out, sizeof out) == 0);

  /* Refusals leave the outputs alone. */
  memset(out, 0x11, sizeof out);
  memcpy(again, out, sizeof out);
  workspace.shape[0] -= 1;
  CHECK_ERROR(HALFTONE_RESOURCE_EXHAUSTED, "workspace", halftone_run(plan, &args, &workspace, NULL));
  CHECK_ERROR(HALFTONE_RESOURCE_EXHAUSTED, "workspace", halftone_schedule(plan, &lengths, &workspace, NULL));
  workspace.shape[0] += 1;
  args.lse = NULL;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "lse", halftone_run(plan, &args, &workspace, NULL));
  args.lse = &lse_view;
  q_view.dtype = HALFTONE_DTYPE_BF16;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "q|bf16|f32", halftone_run(plan, &args, &workspace, NULL));
  q_view.dtype = HALFTONE_DTYPE_F32;
  CHECK(memcmp(again, out, sizeof out) == 0);
  f.lengths[1] = 81;
  CHECK_ERROR(HALFTONE_OUT_OF_RANGE, "81|80", halftone_schedule(plan, &lengths, &workspace, NULL));
  f.lengths[1] = kv_len[1];
  CHECK_OK(halftone_plan_destroy(plan));
  free(memory);
}

/* Plain f32 K and V: the two halves of a request, merged, are the whole. */
static void merge_halves(void) {
  enum { KEYS = 70, FIRST = 33, QUERIES = 4 };
  static float out[3][QUERIES * Q_HEADS * V_DIM], lse[3][QUERIES * Q_HEADS];
  static float merged[QUERIES * Q_HEADS * V_DIM], merged_lse[QUERIES * Q_HEADS];
  static double whole[QUERIES * Q_HEADS * V_DIM], whole_lse[QUERIES * Q_HEADS];
  const int begin[3] = {0, 0, FIRST}, end[3] = {KEYS, FIRST, KEYS};
  halftone_kv_tensors tensors;
  halftone_attention_problem problem;
  halftone_tensor parts[2], part_lse[2], out_view, lse_view;
  const halftone_tensor* part_list[2] = {&parts[0], &parts[1]};
  const halftone_tensor* lse_list[2] = {&part_lse[0], &part_lse[1]};
  size_t i;
  int p;
  CHECK_OK(halftone_attention_problem_init(&problem, sizeof problem));
  problem.batch = 1;
  CHECK_OK(halftone_kv_tensors_init(&tensors, sizeof tensors));
  tensors.dtype = HALFTONE_DTYPE_F32;
  tensors.kv_heads = KV_HEADS;
  tensors.head_dim = DIM;
  tensors.v_head_dim = V_DIM;
  problem.kv_tensors = &tensors;
  problem.q_heads = Q_HEADS;
  problem.max_q_len = QUERIES;
  problem.max_kv_len = KEYS;
  problem.q_dtype = problem.out_dtype = HALFTONE_DTYPE_F32;
  problem.lse = 1;
  for (p = 0; p < 3; ++p) {
    const int keys = end[p] - begin[p];
    int32_t cu_kv[2] = {0, 0}, cu_q[2] = {0, QUERIES};
    halftone_tensor q = tensor(f.q, HALFTONE_DTYPE_F32, 3, QUERIES, Q_HEADS, DIM);
    halftone_tensor k = tensor(f.k + begin[p] * KV_HEADS * DIM, HALFTONE_DTYPE_F32, 3, keys, KV_HEADS, DIM);
    halftone_tensor v =
        tensor(f.v + begin[p] * KV_HEADS * V_DIM, HALFTONE_DTYPE_F32, 3, keys, KV_HEADS, V_DIM);
    halftone_tensor o = tensor(out[p], HALFTONE_DTYPE_F32, 3, QUERIES, Q_HEADS, V_DIM);
    halftone_tensor l = tensor(lse[p], HALFTONE_DTYPE_F32, 2, QUERIES, Q_HEADS, 0);
    halftone_tensor cu_q_view = tensor(cu_q, HALFTONE_DTYPE_INT32, 1, 2, 0, 0);
    halftone_tensor cu_kv_view = tensor(cu_kv, HALFTONE_DTYPE_INT32, 1, 2, 0, 0);
    halftone_sequence_lengths lengths;
    halftone_attention_args args;
    cu_kv[1] = keys;
    CHECK_OK(halftone_sequence_lengths_init(&lengths, sizeof lengths));
    lengths.cu_q = &cu_q_view;
    lengths.cu_kv = &cu_kv_view;
    CHECK_OK(halftone_attention_args_init(&args, sizeof args));
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = &o;
    args.lse = &l;
    args.lengths = &lengths;
    CHECK_OK(halftone_attend(&problem, &args));
    args.cache = &f.cache;
    CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.cache is given beside k|set the other to NULL",
                halftone_attend(&problem, &args));
    args.k = args.v = NULL;
    CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "k and v are absent|plan is for tensors",
                halftone_attend(&problem, &args));
    if (p == 0) continue;
    parts[p - 1] = o;
    part_lse[p - 1] = l;
  }
  out_view = tensor(merged, HALFTONE_DTYPE_F32, 3, QUERIES, Q_HEADS, V_DIM);
  lse_view = tensor(merged_lse, HALFTONE_DTYPE_F32, 2, QUERIES, Q_HEADS, 0);
  CHECK_OK(halftone_merge(2, part_list, lse_list, &out_view, &lse_view, NULL));
  for (i = 0; i < QUERIES * Q_HEADS * V_DIM; ++i) whole[i] = out[0][i];
  for (i = 0; i < QUERIES * Q_HEADS; ++i) whole_lse[i] = lse[0][i];
  CHECK(largest_error(merged, whole, QUERIES * Q_HEADS * V_DIM) < 2e-6);
  CHECK(largest_error(merged_lse, whole_lse, QUERIES * Q_HEADS) < 4e-6);
  CHECK_OK(halftone_merge(2, part_list, lse_list, &out_view, NULL, NULL));

  lse_list[1] = NULL;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "part_lse[1] is NULL|2",
              halftone_merge(2, part_list, lse_list, &out_view, NULL, NULL));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "parts is NULL|count is 2",
              halftone_merge(2, NULL, lse_list, &out_view, NULL, NULL));
  CHECK_ERROR(HALFTONE_RESOURCE_EXHAUSTED, "memory",
              halftone_merge((size_t)-1, part_list, lse_list, &out_view, NULL, NULL));
}

int main(void) {
  static const options cases[] = {
      {0, -1, HALFTONE_SPLIT_REPRODUCIBLE, 0, 0, 0},    {1, -1, HALFTONE_SPLIT_FAST, 0, 0, 0},
      {1, 20, HALFTONE_SPLIT_BATCH_INVARIANT, 0, 0, 0}, {1, -1, HALFTONE_SPLIT_REPRODUCIBLE, 5.0f, 1, 0},
      {1, -1, HALFTONE_SPLIT_REPRODUCIBLE, 0, 0, 1},    {1, 7, HALFTONE_SPLIT_FAST, 2.5f, 1, 1},
  };
  size_t i;
  fill_cache();
  read_cache();
  for (i = 0; i < sizeof cases / sizeof cases[0]; ++i) run_and_compare(&cases[i]);
  merge_halves();
  free(f.pages);
  return check_report("attention_test");
}
