/* Plan handles: information, stale and foreign handles, concurrent use, and one last error per thread. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stddef.h>

#include "fixture.h"

static halftone_kv_format format;
static halftone_cache_spec spec;

static halftone_attention_problem valid_problem(void) {
  halftone_attention_problem problem;
  CHECK_OK(halftone_attention_problem_init(&problem, sizeof problem));
  problem.batch = 8;
  problem.kv = &spec;
  problem.q_heads = 32;
  problem.max_kv_len = 8192;
  problem.causal = 1;
  problem.workers = 7;
  problem.policy = HALFTONE_SPLIT_BATCH_INVARIANT;
  problem.arithmetic = HALFTONE_ARITHMETIC_HALF_INT8;
  return problem;
}

static void information(void) {
  const halftone_attention_problem problem = valid_problem();
  halftone_attention_problem back;
  halftone_plan_info info;
  halftone_plan* plan = NULL;
  char name[32];
  char text[4096] = "untouched";
  size_t length = 0, bytes = 0;
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_plan_info_init(&info, sizeof info));
  CHECK_OK(halftone_plan_get_info(plan, &info));
  CHECK(info.struct_size == sizeof info && info.workers == 7 && info.group == 4);
  CHECK(info.config != NULL && info.config[0] != '\0' && info.reason != NULL && info.reason[0] != '\0');
  CHECK(info.row_block >= 4 && info.kv_tile > 0 && info.split_tokens > 0);
  CHECK(info.max_units == 8 * 8);
  CHECK(info.passes == 1 && info.short_rows == 0 && info.short_config == NULL);
  CHECK(info.staged_bytes == 0);
  CHECK(info.schedule_bytes > 0 && info.workspace_bytes >= info.schedule_bytes);
  CHECK_OK(halftone_plan_workspace_bytes(plan, &bytes));
  CHECK((int64_t)bytes == info.workspace_bytes);

  CHECK_OK(halftone_attention_problem_init(&back, sizeof back));
  CHECK_OK(halftone_plan_get_problem(plan, &back));
  CHECK(back.batch == 8 && back.q_heads == 32 && back.max_kv_len == 8192 && back.causal == 1);
  CHECK(back.policy == HALFTONE_SPLIT_BATCH_INVARIANT && back.kv != &spec);
  CHECK(back.arithmetic == HALFTONE_ARITHMETIC_HALF_INT8);
  CHECK(back.kv->kv_heads == 8 && back.kv->head_dim == 128 && back.kv->page_size == 64);
  CHECK_OK(halftone_kv_format_name(back.kv->k_format, name, sizeof name, NULL));
  CHECK(strcmp(name, "int4-g32") == 0);
  { /* What a plan hands out makes an equal plan. */
    halftone_plan* twin = NULL;
    size_t twin_bytes = 0;
    CHECK_OK(halftone_plan_create(&back, &twin));
    CHECK_OK(halftone_plan_workspace_bytes(twin, &twin_bytes));
    CHECK(twin != plan && twin_bytes == bytes);
    CHECK_OK(halftone_plan_destroy(twin));
  }

  CHECK_OK(halftone_plan_describe(plan, NULL, 0, &length));
  CHECK(length > 0 && length < sizeof text);
  CHECK_ERROR(HALFTONE_RESOURCE_EXHAUSTED, "capacity is 1|NUL", halftone_plan_describe(plan, text, 1, NULL));
  CHECK(strcmp(text, "untouched") == 0);
  CHECK_OK(halftone_plan_describe(plan, text, length + 1, NULL));
  CHECK(strlen(text) == length && strstr(text, info.config) != NULL);
  CHECK_OK(halftone_plan_destroy(plan));
}

/* Of plain tensors, too, the problem comes back, and makes an equal plan. */
static void over_tensors(void) {
  halftone_attention_problem problem = valid_problem(), back;
  halftone_kv_tensors tensors;
  halftone_plan *plan = NULL, *twin = NULL;
  size_t bytes = 0, twin_bytes = 0;
  CHECK_OK(halftone_kv_tensors_init(&tensors, sizeof tensors));
  tensors.dtype = HALFTONE_DTYPE_F16;
  tensors.kv_heads = 8;
  tensors.head_dim = 128;
  tensors.v_head_dim = 64;
  problem.kv = NULL;
  problem.kv_tensors = &tensors;
  for (problem.arithmetic = HALFTONE_ARITHMETIC_FULL_INT8; problem.arithmetic <= HALFTONE_ARITHMETIC_FP8;
       ++problem.arithmetic) {
    CHECK_OK(halftone_plan_create(&problem, &plan));
    CHECK_OK(halftone_attention_problem_init(&back, sizeof back));
    CHECK_OK(halftone_plan_get_problem(plan, &back));
    CHECK(back.arithmetic == problem.arithmetic);
    CHECK_OK(halftone_plan_destroy(plan));
  }
  problem.arithmetic = HALFTONE_ARITHMETIC_HALF_INT8;
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_attention_problem_init(&back, sizeof back));
  CHECK_OK(halftone_plan_get_problem(plan, &back));
  CHECK(back.kv == NULL && back.kv_tensors != NULL && back.kv_tensors != &tensors);
  CHECK(memcmp(back.kv_tensors, &tensors, sizeof tensors) == 0);
  CHECK_OK(halftone_plan_create(&back, &twin));
  CHECK_OK(halftone_plan_workspace_bytes(plan, &bytes));
  CHECK_OK(halftone_plan_workspace_bytes(twin, &twin_bytes));
  CHECK(bytes == twin_bytes);
  CHECK_OK(halftone_plan_destroy(twin));
  CHECK_OK(halftone_plan_destroy(plan));
  tensors.head_dim = 59;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "kv.head_dim is 59|64", halftone_plan_create(&problem, &plan));
}

/* Prompts beside single tokens: two passes, and a caller whose struct ends before them hears of the longer.
 */
static void passes(void) {
  halftone_attention_problem problem = valid_problem();
  halftone_plan_info info, older;
  halftone_plan* plan = NULL;
  problem.max_q_len = 1000;
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_plan_info_init(&info, sizeof info));
  CHECK_OK(halftone_plan_get_info(plan, &info));
  CHECK(info.passes == 2 && info.short_rows == 16);
  CHECK(strcmp(info.short_config, "cpu-decode") == 0 && strcmp(info.config, "cpu-prefill") == 0);
  memset(&older, 0x5a, sizeof older);
  CHECK_OK(halftone_plan_info_init(&older, offsetof(halftone_plan_info, passes)));
  CHECK_OK(halftone_plan_get_info(plan, &older));
  CHECK(strcmp(older.config, "cpu-prefill") == 0 && older.workspace_bytes == info.workspace_bytes);
  CHECK(older.passes == 0x5a5a5a5a);
  CHECK_OK(halftone_plan_destroy(plan));
}

/* The bound of all keys comes back, is checked, and is missing in the struct of an older caller. */
static void total_of_keys(void) {
  halftone_attention_problem problem = valid_problem(), back, older;
  halftone_plan* plan = NULL;
  problem.max_total_kv = 8 * 8192;
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_attention_problem_init(&back, sizeof back));
  CHECK(back.max_total_kv == 0);
  CHECK_OK(halftone_plan_get_problem(plan, &back));
  CHECK(back.max_total_kv == 8 * 8192);
  CHECK_OK(halftone_plan_destroy(plan));
  problem.max_total_kv = 8 * 8192 + 1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "max_total_kv is 65537|batch * max_kv_len = 65536",
              halftone_plan_create(&problem, &plan));
  older = problem;
  older.struct_size = offsetof(halftone_attention_problem, max_total_kv);
  CHECK_OK(halftone_plan_create(&older, &plan));
  CHECK_OK(halftone_plan_get_problem(plan, &back));
  CHECK(back.max_total_kv == 0);
  CHECK_OK(halftone_plan_destroy(plan));
}

/* The same of the bound of the prompts' keys. */
static void keys_of_prompts(void) {
  halftone_attention_problem problem = valid_problem(), back, older;
  halftone_plan* plan = NULL;
  problem.max_total_kv = 9000;
  problem.max_prompt_kv = 9000;
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_attention_problem_init(&back, sizeof back));
  CHECK(back.max_prompt_kv == 0);
  CHECK_OK(halftone_plan_get_problem(plan, &back));
  CHECK(back.max_prompt_kv == 9000);
  CHECK_OK(halftone_plan_destroy(plan));
  problem.max_prompt_kv = 9001;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "max_prompt_kv is 9001|max_total_kv = 9000",
              halftone_plan_create(&problem, &plan));
  older = problem;
  older.struct_size = offsetof(halftone_attention_problem, max_prompt_kv);
  CHECK_OK(halftone_plan_create(&older, &plan));
  CHECK_OK(halftone_plan_get_problem(plan, &back));
  CHECK(back.max_prompt_kv == 0 && back.max_total_kv == 9000);
  CHECK_OK(halftone_plan_destroy(plan));
}

/* The shortest request: 1 is the default, and what 0 means, of callers in whose struct the field was reserved
 * or lies behind the end. */
static void shortest_request(void) {
  halftone_attention_problem problem = valid_problem(), back, older;
  halftone_plan_info info;
  halftone_plan* plan = NULL;
  problem.max_q_len = 1000;
  problem.min_q_len = 5;
  CHECK_OK(halftone_plan_info_init(&info, sizeof info));
  CHECK_OK(halftone_attention_problem_init(&back, sizeof back));
  CHECK_OK(halftone_plan_create(&problem, &plan));
  CHECK_OK(halftone_plan_get_problem(plan, &back));
  CHECK(back.min_q_len == 5);
  CHECK_OK(halftone_plan_get_info(plan, &info));
  CHECK(info.passes == 1);
  CHECK_OK(halftone_plan_destroy(plan));
  older = problem;
  older.struct_size = offsetof(halftone_attention_problem, appends);
  problem.min_q_len = 0;
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(halftone_plan_create(i == 0 ? &problem : &older, &plan));
    CHECK_OK(halftone_plan_get_problem(plan, &back));
    CHECK(back.min_q_len == 1);
    CHECK_OK(halftone_plan_get_info(plan, &info));
    CHECK(info.passes == 2);
    CHECK_OK(halftone_plan_destroy(plan));
  }
  problem.min_q_len = -1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "min_q_len is -1|1 to max_q_len = 1000",
              halftone_plan_create(&problem, &plan));
  problem.min_q_len = 1001;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "min_q_len is 1001|use 1000", halftone_plan_create(&problem, &plan));
}

static void bad_problems(void) {
  halftone_attention_problem problem = valid_problem();
  halftone_plan* const untouched = (halftone_plan*)&problem;
  halftone_plan* plan = untouched;
  problem.q_heads = 33;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "q_heads|33|8", halftone_plan_create(&problem, &plan));
  problem = valid_problem();
  problem.batch = -1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "batch|-1", halftone_plan_create(&problem, &plan));
  problem = valid_problem();
  problem.workers = 65537;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "workers|65537|65536", halftone_plan_create(&problem, &plan));
  problem = valid_problem();
  problem.q_dtype = HALFTONE_DTYPE_INT8;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "q_dtype|int8|bf16", halftone_plan_create(&problem, &plan));
  problem = valid_problem();
  problem.window_left = -2;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "window_left|-2|-1", halftone_plan_create(&problem, &plan));
  problem = valid_problem();
  problem.softcap = -1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "softcap|-1", halftone_plan_create(&problem, &plan));
  problem = valid_problem();
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "plan is NULL", halftone_plan_create(&problem, NULL));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "problem is NULL|halftone_attention_problem",
              halftone_plan_create(NULL, &plan));
  CHECK(plan == untouched);
}

static void stale_and_foreign_handles(void) {
  const halftone_attention_problem problem = valid_problem();
  int on_the_stack = 0;
  halftone_plan* const foreign = (halftone_plan*)&on_the_stack;
  halftone_plan *first = NULL, *second = NULL;
  halftone_plan_info info;
  halftone_attention_args args;
  halftone_sequence_lengths lengths;
  size_t bytes = 0;
  CHECK_OK(halftone_plan_info_init(&info, sizeof info));
  CHECK_OK(halftone_attention_args_init(&args, sizeof args));
  CHECK_OK(halftone_sequence_lengths_init(&lengths, sizeof lengths));
  CHECK_OK(halftone_plan_create(&problem, &first));
  CHECK_OK(halftone_plan_destroy(first));
  /* A new plan never gets the old handle, so the second destroy cannot end it. */
  CHECK_OK(halftone_plan_create(&problem, &second));
  CHECK(second != first);
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "plan is 0x|live handle|destroyed", halftone_plan_destroy(first));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "plan is 0x|live handle", halftone_plan_get_info(first, &info));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "live handle", halftone_plan_workspace_bytes(first, &bytes));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "live handle", halftone_plan_describe(first, NULL, 0, &bytes));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "live handle", halftone_schedule(first, &lengths, NULL, NULL));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "live handle", halftone_run(first, &args, NULL, NULL));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "live handle", halftone_plan_destroy(foreign));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "plan is NULL", halftone_run(NULL, &args, NULL, NULL));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "plan is NULL", halftone_plan_get_info(NULL, &info));
  CHECK_OK(halftone_plan_destroy(NULL));
  CHECK(bytes == 0 && info.config == NULL);
  CHECK_OK(halftone_plan_workspace_bytes(second, &bytes));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "bytes is NULL", halftone_plan_workspace_bytes(second, NULL));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "workspace", halftone_schedule(second, &lengths, NULL, NULL));
  CHECK_OK(halftone_plan_destroy(second));
}

/* Threads make no checks (the counters are not atomic): they return what main checks. */
typedef struct error_thread {
  int rank;
  int ok;
} error_thread;

static void* fail_with_own_rank(void* argument) {
  error_thread* self = (error_thread*)argument;
  char expected[32];
  int i;
  self->ok = halftone_last_error()[0] == '\0';
  snprintf(expected, sizeof expected, "rank is %d", self->rank);
  for (i = 0; i < 200; ++i) {
    halftone_tensor t;
    const int64_t shape[1] = {1};
    self->ok &= halftone_tensor_init(&t, sizeof t, &i, HALFTONE_DTYPE_F32, self->rank, shape) ==
                HALFTONE_INVALID_ARGUMENT;
    self->ok &= strstr(halftone_last_error(), expected) != NULL;
    self->ok &= halftone_tensor_init(&t, sizeof t, &i, HALFTONE_DTYPE_F32, 1, shape) == HALFTONE_OK;
    self->ok &= strstr(halftone_last_error(), expected) != NULL; /* a success leaves it */
  }
  return NULL;
}

static void one_last_error_per_thread(void) {
  enum { THREADS = 8 };
  pthread_t threads[THREADS];
  error_thread state[THREADS];
  char mine[256];
  int i;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "text is NULL", halftone_kv_format_parse(NULL, &format));
  strncpy(mine, halftone_last_error(), sizeof mine - 1);
  mine[sizeof mine - 1] = '\0';
  for (i = 0; i < THREADS; ++i) {
    state[i].rank = 100 + i;
    state[i].ok = 0;
    CHECK(pthread_create(&threads[i], NULL, fail_with_own_rank, &state[i]) == 0);
  }
  for (i = 0; i < THREADS; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(state[i].ok);
  }
  CHECK(strcmp(mine, halftone_last_error()) == 0);
}

typedef struct plan_thread {
  const halftone_attention_problem* problem;
  halftone_plan* shared;
  int ok;
  int destroyed; /* how often this thread's destroy of the shared plan succeeded */
} plan_thread;

static void* use_plans(void* argument) {
  plan_thread* self = (plan_thread*)argument;
  int i;
  self->ok = 1;
  for (i = 0; i < 100; ++i) {
    halftone_plan* own = NULL;
    size_t bytes = 0;
    char text[4096];
    self->ok &= halftone_plan_create(self->problem, &own) == HALFTONE_OK;
    self->ok &= halftone_plan_workspace_bytes(own, &bytes) == HALFTONE_OK && bytes > 0;
    self->ok &= halftone_plan_destroy(own) == HALFTONE_OK;
    self->ok &= halftone_plan_destroy(own) == HALFTONE_INVALID_ARGUMENT;
    /* The shared plan is alive or already destroyed, never anything else. */
    const halftone_status status = halftone_plan_describe(self->shared, text, sizeof text, NULL);
    self->ok &= status == HALFTONE_OK || status == HALFTONE_INVALID_ARGUMENT;
    if (i == 50) self->destroyed += halftone_plan_destroy(self->shared) == HALFTONE_OK;
  }
  return NULL;
}

static void concurrent_use_and_destroy(void) {
  enum { THREADS = 8 };
  const halftone_attention_problem problem = valid_problem();
  pthread_t threads[THREADS];
  plan_thread state[THREADS];
  halftone_plan* shared = NULL;
  int i, destroyed = 0;
  CHECK_OK(halftone_plan_create(&problem, &shared));
  for (i = 0; i < THREADS; ++i) {
    state[i].problem = &problem;
    state[i].shared = shared;
    state[i].ok = state[i].destroyed = 0;
    CHECK(pthread_create(&threads[i], NULL, use_plans, &state[i]) == 0);
  }
  for (i = 0; i < THREADS; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(state[i].ok);
    destroyed += state[i].destroyed;
  }
  CHECK(destroyed == 1);
}

/* A sentence longer than the buffer is cut, not lost. */
static void long_messages_are_cut(void) {
  static char name[5000];
  memset(name, 'x', sizeof name - 1);
  CHECK(halftone_kv_format_parse(name, &format) == HALFTONE_INVALID_ARGUMENT);
  CHECK(strlen(halftone_last_error()) > 20 && strlen(halftone_last_error()) < 2048);
}

int main(void) {
  CHECK_OK(halftone_kv_format_init(&format, sizeof format));
  CHECK_OK(halftone_kv_format_parse("int4-g32", &format));
  CHECK_OK(halftone_cache_spec_init(&spec, sizeof spec));
  spec.kv_heads = 8;
  spec.head_dim = 128;
  spec.k_format = &format;
  information();
  over_tensors();
  passes();
  total_of_keys();
  keys_of_prompts();
  shortest_request();
  bad_problems();
  stale_and_foreign_handles();
  one_last_error_per_thread();
  concurrent_use_and_destroy();
  long_messages_are_cut();
  return check_report("plan_test");
}
