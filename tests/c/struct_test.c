/* Struct sizes and versions: older, newer and uninitialised callers. */
#include "check.h"

/* A caller built against a header whose struct has grown. */
struct newer_spec {
  halftone_cache_spec known;
  uint64_t added;
};

static halftone_cache_spec valid_spec(void) {
  halftone_cache_spec spec;
  CHECK_OK(halftone_cache_spec_init(&spec, sizeof spec));
  spec.kv_heads = 2;
  spec.head_dim = 64;
  return spec;
}

static void init_sets_header_and_defaults(void) {
  halftone_kv_tensors tensors;
  halftone_attention_problem problem;
  halftone_attention_args args;
  halftone_append_args append;
  halftone_paged_kv cache;
  halftone_sequence_lengths lengths;
  halftone_plan_info info;
  memset(&problem, 0xff, sizeof problem);
  CHECK_OK(halftone_attention_problem_init(&problem, sizeof problem));
  CHECK(problem.struct_size == sizeof problem && problem.abi_version == HALFTONE_ABI_VERSION);
  CHECK(problem.batch == 0 && problem.kv == NULL && problem.kv_tensors == NULL && problem.max_q_len == 1);
  CHECK(problem.min_q_len == 1);
  CHECK(problem.window_left == -1 && problem.window_right == -1 && problem.causal == 0);
  CHECK(problem.q_dtype == HALFTONE_DTYPE_BF16 && problem.out_dtype == HALFTONE_DTYPE_BF16);
  CHECK(problem.policy == HALFTONE_SPLIT_REPRODUCIBLE && problem.scale == 0 && problem.workers == 0);
  CHECK(problem.arithmetic == HALFTONE_ARITHMETIC_16BIT);
  memset(&tensors, 0xff, sizeof tensors);
  CHECK_OK(halftone_kv_tensors_init(&tensors, sizeof tensors));
  CHECK(tensors.dtype == HALFTONE_DTYPE_BF16 && tensors.kv_heads == 0 && tensors.v_head_dim == 0);
  memset(&args, 0xff, sizeof args);
  CHECK_OK(halftone_attention_args_init(&args, sizeof args));
  CHECK(args.q == NULL && args.lengths == NULL && args.status == NULL);
  CHECK(args.cache_settled == 0 && args.new_tokens_late == 0 && args.reserved == 0);
  memset(&append, 0xff, sizeof append);
  CHECK_OK(halftone_append_args_init(&append, sizeof append));
  CHECK(append.k == NULL && append.rope_pairing == HALFTONE_ROPE_NONE && append.advance == 0 &&
        append.cache_settled == 0);
  memset(&cache, 0xff, sizeof cache);
  CHECK_OK(halftone_paged_kv_init(&cache, sizeof cache));
  CHECK(cache.spec == NULL && cache.table_mode == HALFTONE_BLOCK_TABLE_TRUSTED);
  CHECK_OK(halftone_sequence_lengths_init(&lengths, sizeof lengths));
  CHECK(lengths.cu_q == NULL && lengths.reserved == 0);
  CHECK_OK(halftone_plan_info_init(&info, sizeof info));
  CHECK(info.struct_size == sizeof info && info.config == NULL);
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "problem is NULL|halftone_attention_problem",
              halftone_attention_problem_init(NULL, sizeof problem));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "problem.struct_size is 0|sizeof(halftone_attention_problem)",
              halftone_attention_problem_init(&problem, 0));
}

static void uninitialised_structs_are_refused(void) {
  halftone_cache_spec spec = valid_spec();
  double bytes = -1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "spec is NULL|halftone_cache_spec",
              halftone_cache_bytes_per_token(NULL, &bytes));
  spec.struct_size = 0;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "spec.struct_size is 0",
              halftone_cache_bytes_per_token(&spec, &bytes));
  spec.struct_size = (size_t)-1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "spec.struct_size is 18446744073709551615|1024",
              halftone_cache_bytes_per_token(&spec, &bytes));
  spec.struct_size = sizeof spec - 4;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "multiple of 8", halftone_cache_bytes_per_token(&spec, &bytes));
  spec = valid_spec();
  spec.abi_version = 0;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "spec.abi_version is 0|HALFTONE_ABI_VERSION",
              halftone_cache_bytes_per_token(&spec, &bytes));
  spec.abi_version = HALFTONE_ABI_VERSION + 1;
  CHECK_ERROR(HALFTONE_UNSUPPORTED, "spec.abi_version is 3|understands 2",
              halftone_cache_bytes_per_token(&spec, &bytes));
  spec.abi_version = HALFTONE_ABI_VERSION - 1;
  CHECK_ERROR(HALFTONE_UNSUPPORTED, "spec.abi_version is 1|understands 2",
              halftone_cache_bytes_per_token(&spec, &bytes));
  spec = valid_spec();
  spec.rope_dim = 1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "rope_dim is 1|32 or 64",
              halftone_cache_bytes_per_token(&spec, &bytes));
  CHECK(bytes == -1);
  {
    const int64_t shape[3] = {1, 1, 64};
    float x[64] = {0};
    halftone_tensor tensor;
    halftone_kv_format format;
    CHECK_OK(halftone_tensor_init(&tensor, sizeof tensor, x, HALFTONE_DTYPE_F32, 3, shape));
    CHECK_OK(halftone_kv_format_init(&format, sizeof format));
    tensor.reserved = 1;
    CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "x.reserved is 1|0",
                halftone_calibrate(&tensor, &format, 0, NULL, NULL));
  }
}

static void older_callers_get_defaults(void) {
  halftone_cache_spec spec = valid_spec();
  halftone_kv_format format;
  char name[32];
  double bytes = 0;
  /* A struct that ends before page_size: what follows belongs to someone else and must not be read. */
  spec.struct_size = offsetof(halftone_cache_spec, page_size);
  spec.page_size = 48;
  spec.rotate_k = 77;
  spec.rope_dim = -1;
  CHECK(spec.struct_size % 8 == 0);
  CHECK_OK(halftone_cache_bytes_per_token(&spec, &bytes));
  CHECK(bytes == 2 * 2 * 64 * 2);
  spec.struct_size = offsetof(halftone_cache_spec, head_dim);
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "spec.struct_size", halftone_cache_bytes_per_token(&spec, &bytes));

  /* An init function writes no further than the caller's struct. */
  memset(&spec, 0x5a, sizeof spec);
  CHECK_OK(halftone_cache_spec_init(&spec, offsetof(halftone_cache_spec, page_size)));
  CHECK(spec.head_dim == 0 && spec.page_size == 0x5a5a5a5a);

  CHECK_OK(halftone_kv_format_init(&format, offsetof(halftone_kv_format, group_size)));
  format.group_size = 77;
  CHECK_OK(halftone_kv_format_name(&format, name, sizeof name, NULL));
  CHECK(strcmp(name, "bf16") == 0);
}

static void newer_callers_work_while_the_tail_is_zero(void) {
  struct newer_spec newer;
  halftone_page_layout layout[2];
  double bytes = 0;
  memset(&newer, 0xff, sizeof newer);
  CHECK_OK(halftone_cache_spec_init(&newer.known, sizeof newer));
  CHECK(newer.known.struct_size == sizeof newer && newer.added == 0);
  newer.known.kv_heads = 1;
  newer.known.head_dim = 128;
  CHECK_OK(halftone_cache_bytes_per_token(&newer.known, &bytes));
  CHECK(bytes == 512);
  newer.added = (uint64_t)1 << 56;
  CHECK_ERROR(HALFTONE_UNSUPPORTED, "spec.struct_size is 72|byte 71 is 1|ends after 64",
              halftone_cache_bytes_per_token(&newer.known, &bytes));

  /* An output struct that is larger than the library's: the unknown tail becomes zero. */
  newer.added = 0;
  memset(layout, 0xff, sizeof layout);
  CHECK_OK(halftone_page_layout_init(&layout[0], sizeof layout));
  layout[1].page_bytes = 5;
  CHECK_OK(halftone_cache_page_layout(&newer.known, &layout[0]));
  CHECK(layout[0].struct_size == sizeof layout && layout[0].page_bytes == 64 * 512);
  CHECK(layout[1].page_bytes == 0);

  /* One that is smaller: nothing behind it is written. */
  memset(layout, 0x5a, sizeof layout);
  CHECK_OK(halftone_page_layout_init(&layout[0], offsetof(halftone_page_layout, v_data_bytes)));
  CHECK_OK(halftone_cache_page_layout(&newer.known, &layout[0]));
  CHECK(layout[0].k_data_bytes == 16 * 256 && layout[0].v_data_bytes == 0x5a5a5a5a5a5a5a5a);
}

static void tensors(void) {
  const int64_t shape[3] = {4, 3, 2};
  const int64_t negative[2] = {4, -3};
  const int64_t huge[3] = {INT64_MAX / 2, 2, 3};
  const int64_t empty[2] = {0, 7};
  float data[24];
  halftone_tensor tensor, before;
  CHECK_OK(halftone_tensor_init(&tensor, sizeof tensor, data, HALFTONE_DTYPE_F32, 3, shape));
  CHECK(tensor.data == data && tensor.rank == 3 && tensor.device_type == HALFTONE_DEVICE_CPU);
  CHECK(tensor.shape[0] == 4 && tensor.shape[2] == 2 && tensor.shape[3] == 0);
  CHECK(tensor.strides[0] == 6 && tensor.strides[1] == 2 && tensor.strides[2] == 1);
  before = tensor;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "rank is 6|0 to 5",
              halftone_tensor_init(&tensor, sizeof tensor, data, HALFTONE_DTYPE_F32, 6, shape));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "shape[1] is -3|at least 0",
              halftone_tensor_init(&tensor, sizeof tensor, data, HALFTONE_DTYPE_F32, 2, negative));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "shape[0] is 4611686018427387903|1537228672809129301",
              halftone_tensor_init(&tensor, sizeof tensor, data, HALFTONE_DTYPE_F32, 3, huge));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "dtype is 10|0 to 9|halftone_dtype",
              halftone_tensor_init(&tensor, sizeof tensor, data, 10, 3, shape));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "shape is NULL",
              halftone_tensor_init(&tensor, sizeof tensor, data, HALFTONE_DTYPE_F32, 3, NULL));
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "tensor is NULL|halftone_tensor",
              halftone_tensor_init(NULL, sizeof tensor, data, HALFTONE_DTYPE_F32, 3, shape));
  CHECK(memcmp(&before, &tensor, sizeof tensor) == 0);
  CHECK_OK(halftone_tensor_init(&tensor, sizeof tensor, NULL, HALFTONE_DTYPE_INT32, 0, NULL));
  CHECK(tensor.rank == 0 && tensor.data == NULL);
  CHECK_OK(halftone_tensor_init(&tensor, sizeof tensor, data, HALFTONE_DTYPE_F32, 2, empty));
  CHECK(tensor.shape[0] == 0 && tensor.shape[1] == 7);
}

static void nested_tensors_are_named_by_their_path(void) {
  const int64_t shape[1] = {1};
  float one = 1;
  halftone_tensor bad;
  halftone_attention_args args;
  halftone_kv_tensors tensors;
  halftone_attention_problem problem;
  halftone_cache_spec spec = valid_spec();
  halftone_paged_kv cache;
  CHECK_OK(halftone_attention_problem_init(&problem, sizeof problem));
  problem.kv = &spec;
  problem.batch = problem.max_kv_len = 1;
  problem.q_heads = 2;
  CHECK_OK(halftone_attention_args_init(&args, sizeof args));
  CHECK_OK(halftone_paged_kv_init(&cache, sizeof cache));
  CHECK_OK(halftone_tensor_init(&bad, sizeof bad, &one, HALFTONE_DTYPE_F32, 1, shape));
  bad.rank = 1000;
  cache.spec = &spec;
  cache.block_table = &bad;
  args.cache = &cache;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.cache.block_table.rank is 1000|0 to 5",
              halftone_attend(&problem, &args));
  bad.rank = 1;
  bad.shape[0] = -1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.cache.block_table.shape[0] is -1",
              halftone_attend(&problem, &args));
  cache.spec = NULL;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "args.cache.spec is NULL", halftone_attend(&problem, &args));
  problem.policy = 3;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "problem.policy is 3|halftone_split_policy",
              halftone_attend(&problem, &args));
  problem.policy = HALFTONE_SPLIT_FAST;
  problem.arithmetic = 4;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "problem.arithmetic is 4|halftone_arithmetic",
              halftone_attend(&problem, &args));
  problem.arithmetic = HALFTONE_ARITHMETIC_16BIT;
  problem.kv = NULL;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT,
              "problem.kv and problem.kv_tensors are both NULL|halftone_kv_tensors",
              halftone_attend(&problem, &args));
  CHECK_OK(halftone_kv_tensors_init(&tensors, sizeof tensors));
  tensors.dtype = 10;
  problem.kv_tensors = &tensors;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "problem.kv_tensors.dtype is 10|halftone_dtype",
              halftone_attend(&problem, &args));
  tensors.dtype = HALFTONE_DTYPE_F32;
  tensors.reserved = 1;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "problem.kv_tensors.reserved is 1",
              halftone_attend(&problem, &args));
  problem.kv = &spec;
  CHECK_ERROR(HALFTONE_INVALID_ARGUMENT, "problem.kv and problem.kv_tensors are both given|either kv",
              halftone_attend(&problem, &args));
}

int main(void) {
  init_sets_header_and_defaults();
  uninitialised_structs_are_refused();
  older_callers_get_defaults();
  newer_callers_work_while_the_tail_is_zero();
  tensors();
  nested_tensors_are_named_by_their_path();
  return check_report("struct_test");
}
