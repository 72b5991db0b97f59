/* Attention that appends, through the C ABI: the bytes and bits of halftone_append() and halftone_run(). */
#include "fixture.h"

enum { BATCH = 3, Q_HEADS = 4, KV_HEADS = 2, DIM = 64, PAGE = 16, PAGES = 9, COLUMNS = 3, QUERIES = 2 };
enum { TOTAL_Q = BATCH * QUERIES, POSITIONS = 48, HALF = 16 };
static const int32_t before[BATCH] = {0, 15, 31};

/* A cache of its own pages: of two that get the same tokens in two ways. */
typedef struct fixture {
  halftone_kv_format format;
  halftone_cache_spec spec;
  halftone_paged_kv cache;
  halftone_tensor pages_view, table_view, lengths_view;
  unsigned char* pages;
  size_t page_bytes;
  int32_t table[BATCH * COLUMNS];
  int32_t lengths[BATCH];
  float out[TOTAL_Q * Q_HEADS * DIM];
} fixture;

static fixture one, two;
static float q[TOTAL_Q * Q_HEADS * DIM], k[TOTAL_Q * KV_HEADS * DIM], v[TOTAL_Q * KV_HEADS * DIM];
static float cos_table[POSITIONS * HALF], sin_table[POSITIONS * HALF];
static int32_t cu[BATCH + 1], positions[TOTAL_Q];

static void make_cache(fixture* f) {
  halftone_page_layout layout;
  int i;
  CHECK_OK(halftone_kv_format_init(&f->format, sizeof f->format));
  CHECK_OK(halftone_kv_format_parse("int4-g32", &f->format));
  CHECK_OK(halftone_cache_spec_init(&f->spec, sizeof f->spec));
  f->spec.k_format = &f->format;
  f->spec.kv_heads = KV_HEADS;
  f->spec.head_dim = DIM;
  f->spec.page_size = PAGE;
  CHECK_OK(halftone_page_layout_init(&layout, sizeof layout));
  CHECK_OK(halftone_cache_page_layout(&f->spec, &layout));
  f->page_bytes = (size_t)layout.page_bytes;
  f->pages = (unsigned char*)allocate(PAGES * f->page_bytes);
  memset(f->pages, 0, PAGES * f->page_bytes); /* stored zeros */
  for (i = 0; i < BATCH * COLUMNS; ++i) f->table[i] = PAGES - 1 - i;
  for (i = 0; i < BATCH; ++i) f->lengths[i] = before[i];
  f->pages_view = tensor(f->pages, HALFTONE_DTYPE_UINT8, 2, PAGES, layout.page_bytes, 0);
  f->table_view = tensor(f->table, HALFTONE_DTYPE_INT32, 2, BATCH, COLUMNS, 0);
  f->lengths_view = tensor(f->lengths, HALFTONE_DTYPE_INT32, 1, BATCH, 0, 0);
  CHECK_OK(halftone_paged_kv_init(&f->cache, sizeof f->cache));
  f->cache.spec = &f->spec;
  f->cache.pages = &f->pages_view;
  f->cache.block_table = &f->table_view;
  f->cache.lengths = &f->lengths_view;
}

static halftone_attention_problem problem_of(const fixture* f, int appends) {
  halftone_attention_problem problem;
  CHECK_OK(halftone_attention_problem_init(&problem, sizeof problem));
  problem.batch = BATCH;
  problem.kv = &f->spec;
  problem.q_heads = Q_HEADS;
  problem.max_q_len = QUERIES;
  problem.max_kv_len = POSITIONS;
  problem.q_dtype = problem.out_dtype = HALFTONE_DTYPE_F32;
  problem.causal = 1;
  problem.appends = appends;
  return problem;
}

int main(void) {
  halftone_tensor q_view = tensor(q, HALFTONE_DTYPE_F32, 3, TOTAL_Q, Q_HEADS, DIM);
  halftone_tensor k_view = tensor(k, HALFTONE_DTYPE_F32, 3, TOTAL_Q, KV_HEADS, DIM);
  halftone_tensor v_view = tensor(v, HALFTONE_DTYPE_F32, 3, TOTAL_Q, KV_HEADS, DIM);
  halftone_tensor cos_view = tensor(cos_table, HALFTONE_DTYPE_F32, 2, POSITIONS, HALF, 0);
  halftone_tensor sin_view = tensor(sin_table, HALFTONE_DTYPE_F32, 2, POSITIONS, HALF, 0);
  halftone_tensor position_view = tensor(positions, HALFTONE_DTYPE_INT32, 1, TOTAL_Q, 0, 0);
  halftone_tensor cu_view = tensor(cu, HALFTONE_DTYPE_INT32, 1, BATCH + 1, 0, 0);
  halftone_tensor one_out = tensor(one.out, HALFTONE_DTYPE_F32, 3, TOTAL_Q, Q_HEADS, DIM);
  halftone_tensor two_out = tensor(two.out, HALFTONE_DTYPE_F32, 3, TOTAL_Q, Q_HEADS, DIM);
  halftone_tensor workspace;
  halftone_append_args append;
  halftone_new_tokens tokens;
  halftone_attention_args args;
  halftone_attention_problem problem, planned;
  halftone_plan_info info;
  halftone_sequence_lengths lengths;
  halftone_plan* plan = NULL;
  unsigned char* memory;
  size_t bytes = 0;
  int i;
  make_cache(&one);
  make_cache(&two);
  fill_random(q, sizeof q / sizeof q[0], 1);
  fill_random(k, sizeof k / sizeof k[0], 2);
  fill_random(v, sizeof v / sizeof v[0], 3);
  fill_random(cos_table, sizeof cos_table / sizeof cos_table[0], 4);
  fill_random(sin_table, sizeof sin_table / sizeof sin_table[0], 5);
  for (i = 0; i <= BATCH; ++i) cu[i] = i * QUERIES;
  for (i = 0; i < TOTAL_Q; ++i) positions[i] = before[i / QUERIES] + i % QUERIES;

  /* In two calls. */
  CHECK_OK(halftone_append_args_init(&append, sizeof append));
  append.k = &k_view;
  append.v = &v_view;
  append.cu_seqlens = &cu_view;
  append.rope_pairing = HALFTONE_ROPE_HALF;
  append.cos = &cos_view;
  append.sin = &sin_view;
  append.positions = &position_view;
  append.advance = 1;
  CHECK_OK(halftone_append(&two.cache, &append, NULL));
  CHECK_OK(halftone_attention_args_init(&args, sizeof args));
  args.q = &q_view;
  args.out = &two_out;
  args.cache = &two.cache;
  problem = problem_of(&two, 0);
  CHECK_OK(halftone_attend(&problem, &args));

  /* In one call: plan, schedule for the lengths before, run. */
  problem = problem_of(&one, 1);
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_attention_problem_init(&planned, sizeof planned));
  CHECK_OK(halftone_plan_get_problem(plan, &planned));
  CHECK(planned.appends == 1);
  CHECK_OK(halftone_plan_info_init(&info, sizeof info));
  CHECK_OK(halftone_plan_get_info(plan, &info));
  CHECK(info.fuses_append == 0);
  CHECK_OK(halftone_plan_workspace_bytes(plan, &bytes));
  memory = (unsigned char*)allocate(bytes);
  workspace = tensor(memory, HALFTONE_DTYPE_UINT8, 1, (int64_t)bytes, 0, 0);
  CHECK_OK(halftone_sequence_lengths_init(&lengths, sizeof lengths));
  lengths.kv_lengths = &one.lengths_view;
  CHECK_OK(halftone_schedule(plan, &lengths, &workspace, NULL));
  args.out = &one_out;
  args.cache = &one.cache;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "k of append is absent|problem.appends",
              halftone_run(plan, &args, &workspace, NULL));
  memset(&tokens, 0xff, sizeof tokens);
  CHECK_OK(halftone_new_tokens_init(&tokens, sizeof tokens));
  CHECK(tokens.k == NULL && tokens.rope_pairing == HALFTONE_ROPE_NONE && tokens.advance == 0);
  tokens.k = &k_view;
  tokens.v = &v_view;
  tokens.rope_pairing = HALFTONE_ROPE_HALF;
  tokens.cos = &cos_view;
  tokens.sin = &sin_view;
  tokens.positions = &position_view;
  tokens.advance = 2;
  args.append = &tokens;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.append.advance is 2|0 (no) or 1",
              halftone_run(plan, &args, &workspace, NULL));
  tokens.advance = 1;
  tokens.rope_pairing = 9;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.append.rope_pairing is 9",
              halftone_run(plan, &args, &workspace, NULL));
  tokens.rope_pairing = HALFTONE_ROPE_HALF;
  v[7] = NAN;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "v[0, 0, 7] is nan", halftone_run(plan, &args, &workspace, NULL));
  fill_random(v, sizeof v / sizeof v[0], 3);
  for (i = 0; i < BATCH; ++i) CHECK(one.lengths[i] == before[i]);
  for (i = 0; i < 2; ++i) { /* a second time as well: tokens go where the schedule says */
    CHECK_OK(halftone_run(plan, &args, &workspace, NULL));
    CHECK(memcmp(one.pages, two.pages, PAGES * one.page_bytes) == 0);
    CHECK(memcmp(one.lengths, two.lengths, sizeof one.lengths) == 0);
    CHECK(memcmp(one.out, two.out, sizeof one.out) == 0);
  }
  args.new_tokens_late = 5;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.new_tokens_late is 5|0 (no) or 1",
              halftone_run(plan, &args, &workspace, NULL));
  args.new_tokens_late = 1; /* what a promise leaves out; the CPU needs none */
  args.reserved = 1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.reserved is 1", halftone_run(plan, &args, &workspace, NULL));
  args.reserved = 0;
  CHECK_OK(halftone_run(plan, &args, &workspace, NULL));
  CHECK(memcmp(one.out, two.out, sizeof one.out) == 0);
  CHECK_OK(halftone_plan_destroy(plan));

  problem.appends = 0;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "k of append is present|appends = true",
              halftone_attend(&problem, &args));
  problem.appends = 1;
  problem.top_k = 8;
  problem.causal = 0;
  CHECK_ERROR(HALFTONE_UNSUPPORTED, "appends is true|listed.top_k is 8",
              halftone_plan_create(&problem, &plan));
  free(memory);
  free(one.pages);
  free(two.pages);
  return check_report("step_test");
}
