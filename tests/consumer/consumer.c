/* The same program through the C ABI: two tokens into an int8 cache, then one query over them. */
#include <halftone/halftone.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define DIM 64
#define TRY(call)                                                \
  do {                                                           \
    if ((call) != HALFTONE_OK) {                                 \
      fprintf(stderr, "%s: %s\n", #call, halftone_last_error()); \
      return 1;                                                  \
    }                                                            \
  } while (0)

/* A row-major view with up to three dims; a dim of 0 ends them. */
static halftone_status view(halftone_tensor* t, const void* data, halftone_dtype dtype, int64_t a, int64_t b,
                            int64_t c) {
  int64_t shape[3];
  shape[0] = a;
  shape[1] = b;
  shape[2] = c;
  return halftone_tensor_init(t, sizeof *t, data, dtype, b == 0 ? 1 : c == 0 ? 2 : 3, shape);
}

int main(void) {
  static float k[2 * DIM], v[2 * DIM], q[DIM], out[DIM];
  static const int32_t cu_seqlens[2] = {0, 2};
  int32_t table = 0, length = 0;
  halftone_kv_format format;
  halftone_cache_spec spec;
  halftone_page_layout layout;
  halftone_paged_kv cache;
  halftone_append_args tokens;
  halftone_attention_problem problem;
  halftone_attention_args args;
  halftone_tensor t_pages, t_table, t_length, t_k, t_v, t_cu, t_q, t_out;
  char *memory, *pages;
  int i;

  TRY(halftone_kv_format_init(&format, sizeof format));
  TRY(halftone_kv_format_parse("int8-head", &format));
  TRY(halftone_cache_spec_init(&spec, sizeof spec));
  spec.k_format = spec.v_format = &format;
  spec.kv_heads = 1;
  spec.head_dim = DIM;
  spec.page_size = 16;
  TRY(halftone_page_layout_init(&layout, sizeof layout));
  TRY(halftone_cache_page_layout(&spec, &layout));
  memory = malloc((size_t)layout.page_bytes + 16);
  if (memory == NULL) return 1;
  pages = memory + (16 - (uintptr_t)memory % 16) % 16;

  for (i = 0; i < DIM; ++i) {
    q[i] = 1;
    v[i] = 1;
    v[DIM + i] = 3;
  }
  TRY(halftone_paged_kv_init(&cache, sizeof cache));
  TRY(view(&t_pages, pages, HALFTONE_DTYPE_UINT8, 1, layout.page_bytes, 0));
  TRY(view(&t_table, &table, HALFTONE_DTYPE_INT32, 1, 1, 0));
  TRY(view(&t_length, &length, HALFTONE_DTYPE_INT32, 1, 0, 0));
  cache.spec = &spec;
  cache.pages = &t_pages;
  cache.block_table = &t_table;
  cache.lengths = &t_length;

  TRY(halftone_append_args_init(&tokens, sizeof tokens));
  TRY(view(&t_k, k, HALFTONE_DTYPE_F32, 2, 1, DIM));
  TRY(view(&t_v, v, HALFTONE_DTYPE_F32, 2, 1, DIM));
  TRY(view(&t_cu, cu_seqlens, HALFTONE_DTYPE_INT32, 2, 0, 0));
  tokens.k = &t_k;
  tokens.v = &t_v;
  tokens.cu_seqlens = &t_cu;
  TRY(halftone_append(&cache, &tokens, NULL));
  length = 2;

  TRY(halftone_attention_problem_init(&problem, sizeof problem));
  problem.batch = 1;
  problem.q_heads = 1;
  problem.kv = &spec;
  problem.max_kv_len = 16;
  problem.q_dtype = problem.out_dtype = HALFTONE_DTYPE_F32;
  TRY(halftone_attention_args_init(&args, sizeof args));
  TRY(view(&t_q, q, HALFTONE_DTYPE_F32, 1, 1, DIM));
  TRY(view(&t_out, out, HALFTONE_DTYPE_F32, 1, 1, DIM));
  args.q = &t_q;
  args.out = &t_out;
  args.cache = &cache;
  TRY(halftone_attend(&problem, &args));
  free(memory);

  printf("halftone %s: attention gives %g\n", halftone_version(), out[0]);
  for (i = 0; i < DIM; ++i) {
    if (!(fabs(out[i] - 2.0) < 2e-3)) return 1; /* the mean of the values 1 and 3 */
  }
  return 0;
}
