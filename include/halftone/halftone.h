/*
 * halftone's C ABI: the whole library from C99 or from any language with a C foreign-function interface.
 *
 * Status. Every function that can fail returns a halftone_status. HALFTONE_OK is 0; after anything else,
 * halftone_last_error() is one sentence that names the argument, its value, the limit and the remedy. User
 * errors are found before any work is done: outputs are untouched. No C++ exception leaves a function.
 *
 * Structs. Every struct begins with struct_size and abi_version. halftone_X_init(&x, sizeof(halftone_X)) sets
 * both, and the defaults of the other fields; the comments name those that are not 0 or NULL. A struct refers
 * to another through a pointer, so each can grow at its end.
 * A struct_size below the library's means a caller built against an older header: the missing fields take the
 * defaults of the init function (those without a default must be there). A struct_size above it means a newer
 * header: accepted while the unknown tail is zero. Everything that a struct points to need only live during
 * the call that reads it; tensors are views of memory that the caller owns.
 *
 * Tensors. A pointer to a halftone_tensor may be NULL where the comment says "optional". A tensor without
 * elements may have NULL data. Shapes are written [outer, ..., inner]; "f32" and the like stand for
 * HALFTONE_DTYPE_F32. T tokens; q_heads, a multiple of kv_heads; head_dim of Q and K, v_dim of V and O.
 *
 * Threads. All functions may be called from any thread at once. A plan may be used by many threads;
 * destroying it while another thread uses it is safe, because a call in flight keeps it alive. On the CPU, a
 * process forked after calls on several threads computes on one, with the same bits.
 */
#ifndef HALFTONE_HALFTONE_H_
#define HALFTONE_HALFTONE_H_

#include <stddef.h> /* NOLINT(modernize-deprecated-headers): C */
#include <stdint.h> /* NOLINT(modernize-deprecated-headers): C */

#include "halftone/c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- KV formats ---- */

/* What shares one quantisation scale. */
typedef enum halftone_granularity {
  HALFTONE_GRANULARITY_NONE = 0,       /* 16-bit formats: no scale */
  HALFTONE_GRANULARITY_TENSOR = 1,     /* one static scale for the whole cache, supplied by the caller */
  HALFTONE_GRANULARITY_HEAD = 2,       /* one static scale per KV head, supplied by the caller */
  HALFTONE_GRANULARITY_TOKEN = 3,      /* one scale per token, shared by its KV heads; append computes it */
  HALFTONE_GRANULARITY_TOKEN_HEAD = 4, /* one scale per token and KV head, likewise */
  HALFTONE_GRANULARITY_GROUP = 5       /* one scale per group_size dims of a token and head, likewise */
} halftone_granularity;

/* How K or V values are stored; bf16 by default. Symmetric: x = q * scale. Asymmetric: x = q * scale + min
 * with q >= 0. int8 codes are in [-127, 127] (symmetric) or [0, 255] (asymmetric), int4 codes are q + 8 with
 * q in [-7, 7] or q in [0, 15]; e4m3 is always symmetric. */
typedef struct halftone_kv_format {
  size_t struct_size;
  uint32_t abi_version;
  int32_t dtype;       /* halftone_dtype: BF16, F16, E4M3, INT8 or INT4 */
  int32_t granularity; /* halftone_granularity */
  int32_t asymmetric;  /* 0 or 1 */
  int32_t group_size;  /* 32, 64 or 128 with HALFTONE_GRANULARITY_GROUP, else 0 */
  int32_t scale_dtype; /* HALFTONE_DTYPE_F16 or _F32: of the scales stored in pages; latent: _E8M0, too */
} halftone_kv_format;
HALFTONE_API halftone_status halftone_kv_format_init(halftone_kv_format* format, size_t struct_size);

/* Parses a named format ("int4-g32") or the general form
 * `bf16 | fp16 | (fp8|int8|int4)-(tensor|static-head|token|token-head|g32|g64|g128)[-sym|-asym][-f16|-f32]`
 * into an initialised *format. Fails with INVALID_ARGUMENT naming the formats that are nearest in meaning. */
HALFTONE_API halftone_status halftone_kv_format_parse(const char* text, halftone_kv_format* format);

/* Writes the shortest text that halftone_kv_format_parse() turns back into *format, as
 * halftone_plan_describe() writes its text. */
HALFTONE_API halftone_status halftone_kv_format_name(const halftone_kv_format* format, char* buffer,
                                                     size_t capacity, size_t* length);

/* Succeeds when `format` can store vectors of `head_dim` values; else INVALID_ARGUMENT or UNSUPPORTED, with
 * `argument` (NULL: "format") as the format's name in the sentence. */
HALFTONE_API halftone_status halftone_kv_format_check(const halftone_kv_format* format, int32_t head_dim,
                                                      const char* argument);

/* How many formats have a name of their own; the list is in order of falling size. */
HALFTONE_API size_t halftone_named_format_count(void);

/* Entry `index` of that list, else OUT_OF_RANGE. `format` (initialised), `name` and `description` are each
 * optional; the strings are constants. */
HALFTONE_API halftone_status halftone_named_format_get(size_t index, halftone_kv_format* format,
                                                       const char** name, const char** description);

/* ---- The paged KV cache ---- */

/* Everything that fixes the bytes of a page: of K and V stored apart, or, with rope_dim, of a latent (MLA)
 * that is K and V at once, see halftone_cache_spec_latent(). */
typedef struct halftone_cache_spec {
  size_t struct_size;
  uint32_t abi_version;
  int32_t kv_heads;                   /* >= 1; latent: 1 */
  const halftone_kv_format* k_format; /* NULL: bf16 */
  const halftone_kv_format* v_format; /* NULL: as k_format */
  int32_t head_dim;                   /* of K and Q: 64, 80, 96, 128, 192, 256 or 512; latent: both below */
  int32_t v_head_dim;                 /* of V and O: as head_dim, default 0 means that; latent: 256 or 512 */
  int32_t page_size;                  /* tokens per page: 16, 32, 64 (default), 128 or 256 */
  int32_t rotate_k;                   /* 1: store K Hadamard-rotated in blocks; attention rotates Q alike */
  int32_t rotate_v;                   /* 1: store V Hadamard-rotated in blocks; undone on the output */
  int32_t rope_dim;                   /* latent: rotary dims at K's end, 32 or 64, in bf16; default 0: none */
  int32_t offset_k; /* 1: K, quantised and not latent, is stored less an offset per channel */
  int32_t scale_k;  /* 1: divided by a scale per channel, which attention multiplies Q with */
} halftone_cache_spec;
HALFTONE_API halftone_status halftone_cache_spec_init(halftone_cache_spec* spec, size_t struct_size);

/* Makes an initialised *spec that of a latent cache: one vector per token for all query heads, `latent_dim`
 * dims in `format` (NULL: bf16), which are V and the beginning of K, then `rope_dim` dims of K in bf16. A
 * token's bytes are contiguous; fp8-g128-f32 with 512 and 64 dims gives the 656-byte token of FlashMLA. The
 * other fields, page_size among them, stay. `format` must live as long as *spec is used. Errors are found
 * where the spec is used. Set v_head_dim to head_dim afterwards and V has the rotary dims, too: fp8-g64-e8m0
 * with 448 and 64 dims is then the token of 584 bytes. Append to such a cache with k [T, 1, head_dim] and v
 * NULL. */
HALFTONE_API halftone_status halftone_cache_spec_latent(halftone_cache_spec* spec,
                                                        const halftone_kv_format* format, int32_t latent_dim,
                                                        int32_t rope_dim);

/* Sizes and offsets in bytes. A page holds, for each KV head, page_size / 16 tiles; a tile of 16 tokens holds
 * K data, V data, K params and V params in this order, each 16-byte aligned. A tile of a latent cache holds
 * 16 records, one per token, see docs/formats.md; the offsets are then those of its first token. */
typedef struct halftone_page_layout {
  size_t struct_size;
  uint32_t abi_version;
  uint32_t reserved;
  int64_t k_data_bytes;   /* per tile */
  int64_t v_data_bytes;   /* per tile */
  int64_t k_param_bytes;  /* per tile: scales, then mins if asymmetric */
  int64_t v_param_bytes;  /* per tile */
  int64_t v_data_offset;  /* within a tile */
  int64_t k_param_offset; /* within a tile */
  int64_t v_param_offset; /* within a tile */
  int64_t tile_bytes;
  int64_t head_bytes; /* tile_bytes * page_size / 16: one contiguous (page, head) block */
  int64_t page_bytes; /* head_bytes * kv_heads */
  int64_t row_bytes;  /* of a latent cache: from a token's record to the next; else 0 */
} halftone_page_layout;
HALFTONE_API halftone_status halftone_page_layout_init(halftone_page_layout* layout, size_t struct_size);

/* Validates `spec` and fills an initialised *layout. Fails with INVALID_ARGUMENT or UNSUPPORTED. */
HALFTONE_API halftone_status halftone_cache_page_layout(const halftone_cache_spec* spec,
                                                        halftone_page_layout* layout);

/* Bytes that one token occupies over all KV heads, K and V, scales included. */
HALFTONE_API halftone_status halftone_cache_bytes_per_token(const halftone_cache_spec* spec, double* bytes);

/* How entries of the block table are treated. */
typedef enum halftone_block_table_mode {
  HALFTONE_BLOCK_TABLE_TRUSTED = 0, /* live entries are valid; the CPU still checks: OUT_OF_RANGE */
  HALFTONE_BLOCK_TABLE_CLAMPED = 1  /* a bad live entry excludes its tokens, sets bit 0 of status */
} halftone_block_table_mode;

/* A view of the caller's cache. All tensors live on one device. Append stores channel d of K of head h, after
 * the rotary embedding and before a rotation, as (k - k_offset[h][d]) * (1 / k_channel_scale[h][d]). The
 * static scales (and mins, if asymmetric) are f32 [1] for HALFTONE_GRANULARITY_TENSOR or [kv_heads] for
 * _HEAD, finite, scales > 0; present exactly then. */
typedef struct halftone_paged_kv {
  size_t struct_size;
  uint32_t abi_version;
  int32_t table_mode; /* halftone_block_table_mode */
  const halftone_cache_spec* spec;
  const halftone_tensor* pages;       /* uint8 [num_pages, page_bytes]; 16-byte aligned rows */
  const halftone_tensor* block_table; /* int32 [batch, max_pages_per_request]; dead entries are not read */
  const halftone_tensor* lengths;     /* int32 [batch]: live tokens of each request */
  const halftone_tensor* k_scale;     /* optional */
  const halftone_tensor* k_min;       /* optional */
  const halftone_tensor* v_scale;     /* optional */
  const halftone_tensor* v_min;       /* optional */
  const halftone_tensor* k_offset;    /* f32 [kv_heads, head_dim]; exactly with offset_k of the spec */
  const halftone_tensor* k_channel_scale; /* likewise with scale_k, within [2^-16, 2^16] */
} halftone_paged_kv;
HALFTONE_API halftone_status halftone_paged_kv_init(halftone_paged_kv* cache, size_t struct_size);

/* Which dims a rotary embedding pairs. */
typedef enum halftone_rope_pairing {
  HALFTONE_ROPE_NONE = 0,
  HALFTONE_ROPE_HALF = 1,       /* (i, i + rotary_dim/2): GPT-NeoX, Llama in most checkpoints */
  HALFTONE_ROPE_INTERLEAVED = 2 /* (2i, 2i + 1): GPT-J, RoFormer (arXiv:2104.09864) */
} halftone_rope_pairing;

/* New tokens and where they go: exactly one of slot_mapping and cu_seqlens is present. The rotary embedding,
 * if any, is applied to K before it is rotated and quantised; dims from rotary_dim on pass through. */
typedef struct halftone_append_args {
  size_t struct_size;
  uint32_t abi_version;
  int32_t rope_pairing;                /* halftone_rope_pairing; NONE is the default */
  const halftone_tensor* k;            /* f32, f16 or bf16 [T, kv_heads, head_dim]; last dim contiguous */
  const halftone_tensor* v;            /* same dtype [T, kv_heads, v_dim]; last dim contiguous; NULL for a
                                          latent cache, whose V is a part of K */
  const halftone_tensor* slot_mapping; /* int64 [T]: page * page_size + offset; negative skips the token */
  const halftone_tensor* cu_seqlens;   /* int32 [batch + 1]: tokens [cu[i], cu[i+1]) go to request i from
                                          position lengths[i] on, through block_table */
  const halftone_tensor* cos;          /* f32 [max_position, rotary_dim/2]; exactly with a rope_pairing */
  const halftone_tensor* sin;          /* as cos */
  const halftone_tensor* positions;    /* int32 [T]: row of cos and sin of each appended token */
  const halftone_tensor*
      status;      /* int32 [1], sticky: bit 0 bad table entry, bit 1 bad input, bit 3 bad static scale,
                      bit 4 V beyond 2,048 where f16 scales are stored; CUDA needs it */
  int32_t advance; /* 0 or 1: with cu_seqlens, lengths[i] then grows by cu[i+1] - cu[i]. Once per step: of
                      layers that share `lengths`, only the last one appended to may advance them */
  int32_t cache_settled; /* 0 or 1: a promise, see AppendArgs in cache.h */
} halftone_append_args;
HALFTONE_API halftone_status halftone_append_args_init(halftone_append_args* args, size_t struct_size);

/* Quantises K and V and writes them into the cache. The caller updates `lengths` afterwards, unless
 * args->advance is 1. Only the bytes of the addressed slots (and lengths) change. With slot_mapping, the
 * cache's block_table and lengths are optional.
 * `stream`: a cudaStream_t on CUDA, NULL on the CPU. CPU: OUT_OF_RANGE (slot or page beyond the cache) and
 * INVALID_ARGUMENT (NaN or a magnitude beyond 2^100, a slot twice) before any byte is written. */
HALFTONE_API halftone_status halftone_append(const halftone_paged_kv* cache, const halftone_append_args* args,
                                             void* stream);

/* Reads a cache back in the caller's basis (rotations and channels undone), request after request. k_out:
 * f32, f16 or bf16 [sum(lengths), kv_heads, head_dim]; v_out likewise with v_dim. Either is optional. On
 * CUDA, where the lengths lie on the device, rows beyond sum(lengths) become zeros and tokens beyond the rows
 * are left out.
 */
HALFTONE_API halftone_status halftone_dequantize(const halftone_paged_kv* cache, const halftone_tensor* k_out,
                                                 const halftone_tensor* v_out, void* stream);

/* Static scales that let `x` be stored without clipping. x: f32, f16 or bf16 [T, kv_heads, dim] on the CPU.
 * `rotate`: 1 when the cache rotates this part. `scale`: f32 [1] (HALFTONE_GRANULARITY_TENSOR) or [kv_heads]
 * (_HEAD), contiguous, on the CPU, written; `min` likewise, present exactly when the format is asymmetric. */
HALFTONE_API halftone_status halftone_calibrate(const halftone_tensor* x, const halftone_kv_format* format,
                                                int32_t rotate, const halftone_tensor* scale,
                                                const halftone_tensor* min);

/* Offset and scale of K's channels with which the logits of a sample, stored in `format`, err least. k: f32,
 * f16 or bf16 [T, kv_heads, head_dim] after the rotary embedding, on the CPU; `rotate`: 1 when the cache
 * rotates K; q: optional, [Tq, q_heads, head_dim] of queries, which say what a channel counts. `offset` and
 * `scale`: f32 [kv_heads, head_dim], contiguous, on the CPU, written; *offset_k and *scale_k become 1 where
 * they help, for the spec, else 0 with offsets of 0 and scales of 1. Static scales beside them are those of K
 * as append stores it. */
HALFTONE_API halftone_status halftone_calibrate_channels(
    const halftone_tensor* k, const halftone_kv_format* format, int32_t rotate, const halftone_tensor* q,
    const halftone_tensor* offset, const halftone_tensor* scale, int32_t* offset_k, int32_t* scale_k);

/* K or V of a cache. */
typedef enum halftone_kv_part { HALFTONE_PART_K = 0, HALFTONE_PART_V = 1 } halftone_kv_part;

/* FBGEMM gen_ai INT4 rows: [half2{scale, shift} x groups][nibbles, even dim low], x = q * scale + shift.
 * rows: uint8 [T, kv_heads, 4 * groups + dim/2]; token t lives in slot slots[t] (int64 [T], >= 0). The part's
 * format must be asymmetric int4 with f16 scales and as many groups, not rotated; both directions are exact.
 * CPU only. Fails with INVALID_ARGUMENT, UNSUPPORTED or OUT_OF_RANGE. */
HALFTONE_API halftone_status halftone_import_fbgemm_int4(const halftone_paged_kv* cache, int32_t part,
                                                         const halftone_tensor* rows,
                                                         const halftone_tensor* slots);
HALFTONE_API halftone_status halftone_export_fbgemm_int4(const halftone_paged_kv* cache, int32_t part,
                                                         const halftone_tensor* slots,
                                                         const halftone_tensor* rows);

/* ---- Attention: plan once per shape, schedule once per step, run once per layer ---- */

/* How the KV range of a request is split over workers; partial results are merged in a fixed order. */
typedef enum halftone_split_policy {
  HALFTONE_SPLIT_FAST = 0,           /* balanced; work may move between workers at run time */
  HALFTONE_SPLIT_REPRODUCIBLE = 1,   /* balanced; the same plan, lengths and input give the same bits */
  HALFTONE_SPLIT_BATCH_INVARIANT = 2 /* absolute split positions: bits do not depend on a neighbour */
} halftone_split_policy;

/* In what precision Q K^T and P V take their operands. The caller's choice: a lower one than 16 bits never
 * comes of itself. Logits, softmax and sums are fp32 in each. A backend that does not serve one refuses it
 * (UNSUPPORTED). docs/arithmetic.md defines each bit by bit. */
typedef enum halftone_arithmetic {
  HALFTONE_ARITHMETIC_16BIT = 0,     /* values of at least 16 bits */
  HALFTONE_ARITHMETIC_HALF_INT8 = 1, /* Q K^T of 8-bit integers (SageAttention, arXiv:2410.02367) */
  HALFTONE_ARITHMETIC_FULL_INT8 = 2, /* P V of 8-bit integers as well */
  HALFTONE_ARITHMETIC_FP8 = 3        /* both products of E4M3 (FlashAttention-3, arXiv:2407.08608) */
} halftone_arithmetic;

/* Plain K and V tensors, as a problem describes them where there is no cache. CUDA: F16 and BF16 with Q
 * alike, V of as many dims as K or 128 beside 192 (else UNSUPPORTED). */
typedef struct halftone_kv_tensors {
  size_t struct_size;
  uint32_t abi_version;
  int32_t dtype;      /* of both: F32, F16 or BF16 (default) */
  int32_t kv_heads;   /* >= 1 */
  int32_t head_dim;   /* of K and Q: 64, 80, 96, 128, 192, 256 or 512 */
  int32_t v_head_dim; /* of V and O: the same choices; default 0 means head_dim */
  int32_t reserved;   /* 0 */
} halftone_kv_tensors;
HALFTONE_API halftone_status halftone_kv_tensors_init(halftone_kv_tensors* tensors, size_t struct_size);

/* Shapes, options and bounds: everything that a plan depends on. Never the values of lengths.
 * K and V lie in the pages of a cache or in tensors: exactly one of kv and kv_tensors is given.
 * Mask: with kv_len keys and q_len queries, query i stands at position p = i + kv_len - q_len (bottom-right
 * alignment) and sees key j when j <= p (causal), j >= p - window_left and j <= p + window_right. */
typedef struct halftone_attention_problem {
  size_t struct_size;
  uint32_t abi_version;
  int32_t batch;                         /* requests; 0 is a no-op */
  const halftone_cache_spec* kv;         /* of the pages of a cache; else NULL */
  const halftone_kv_tensors* kv_tensors; /* of plain tensors; else NULL */
  int32_t q_heads;                       /* a multiple of kv_heads */
  int32_t max_kv_len;                    /* upper bound of a request's keys */
  int32_t max_q_len;                     /* upper bound of a request's queries; default 1 */
  int32_t device_type;                   /* halftone_device_type; default CPU */
  int32_t device_index;                  /* default 0 */
  int32_t q_dtype;                       /* F32, F16 or BF16 (default) */
  int32_t out_dtype;                     /* F32, F16 or BF16 (default) */
  int32_t causal;                        /* default 0 */
  int32_t window_left;                   /* default -1: unlimited */
  int32_t window_right;                  /* default -1: unlimited */
  float scale;                           /* logit = scale * q.k; default 0 means 1/sqrt(head_dim) */
  float softcap;        /* > 0: logit = softcap * tanh(logit / softcap), before ALiBi; default 0 */
  int32_t alibi;        /* 1: add -slope[head] * |p - j| (arXiv:2108.12409) */
  int32_t sinks;        /* 1: a per-head logit joins the softmax denominator (arXiv:2309.17453) */
  int32_t lse;          /* 1: write the natural-log sum of exponentials, sink included */
  int32_t policy;       /* halftone_split_policy; default REPRODUCIBLE */
  int32_t workers;      /* 1 to 65536; default 0: one per SM (CUDA) or OpenMP thread (CPU) */
  int32_t arithmetic;   /* halftone_arithmetic; default 16BIT */
  int64_t max_total_kv; /* upper bound of all requests' keys; default 0: batch * max_kv_len. It sizes
                           staged_bytes of halftone_plan_info; on CUDA keys beyond it are left out there */
  int32_t top_k;        /* lists: each query attends to keys that its list of so many slots names,
                           see halftone_attention_args; up to 65,536; default 0: all keys */
  int32_t extra_top_k;  /* of a second list, over a second cache; default 0: none */
  const halftone_cache_spec* extra; /* that cache's; exactly with extra_top_k */
  int32_t appends;   /* 1: halftone_run() appends the step's new tokens, see halftone_new_tokens. kv_lengths
                        then say what the cache holds before the step; request i has kv_lengths[i] + q_len
                        keys, which max_kv_len, max_total_kv and max_prompt_kv bound. A cache only, without
                        lists */
  int32_t min_q_len; /* expected queries of the shortest request that has any, 1 to max_q_len; default 1,
                        which 0 means, too. A hint for the choice of kernels, not a limit */
  int64_t max_prompt_kv; /* upper bound of the keys of all requests of more than one query; default 0:
                            max_total_kv, in whose place it sizes staged_bytes where no single query is
                            staged; keys beyond it are left out there, too */
} halftone_attention_problem;
HALFTONE_API halftone_status halftone_attention_problem_init(halftone_attention_problem* problem,
                                                             size_t struct_size);

/* An immutable plan. Handles are never reused: a destroyed or foreign one gives INVALID_ARGUMENT. */
typedef struct halftone_plan halftone_plan;

/* Validates the whole problem and chooses a configuration. *plan becomes a handle for
 * halftone_plan_destroy(). On failure (INVALID_ARGUMENT, UNSUPPORTED or RESOURCE_EXHAUSTED) it is untouched.
 */
HALFTONE_API halftone_status halftone_plan_create(const halftone_attention_problem* problem,
                                                  halftone_plan** plan);

/* Ends a plan; NULL is allowed. */
HALFTONE_API halftone_status halftone_plan_destroy(halftone_plan* plan);

/* What a plan decided. With two passes, requests of at most short_rows packed rows (queries times query heads
 * per KV head) are short_config's; the other fields are about the pass of the others. */
typedef struct halftone_plan_info {
  size_t struct_size;
  uint32_t abi_version;
  int32_t workers;
  const char* config;       /* name of the row of the configuration table; owned by the plan */
  const char* reason;       /* why this row; owned by the plan */
  int32_t group;            /* query heads per KV head */
  int32_t row_block;        /* packed query rows of one work unit */
  int32_t kv_tile;          /* tokens: the granularity of splits */
  int32_t split_tokens;     /* batch_invariant: distance of the split boundaries in tokens; else 0 */
  int64_t max_units;        /* (request, KV head, row block) triples at the bounds */
  int64_t max_partials;     /* partial results that fit into the workspace */
  int64_t schedule_bytes;   /* part of the workspace that halftone_schedule() fills */
  int64_t workspace_bytes;  /* the whole workspace */
  int32_t passes;           /* that halftone_run() makes over the batch: 1 or 2 */
  int32_t short_rows;       /* 0 with one pass */
  const char* short_config; /* likewise NULL; owned by the plan */
  int64_t staged_bytes;     /* of the workspace, for K and V that halftone_run() dequantises, or K of which it
                               makes codes, before a kernel reads them; 0: it reads them where they are */
  int32_t fuses_append;     /* 1: the attention kernels append. 0 with problem.appends: halftone_run() does so
                               before them, on CUDA in a launch of its own */
  int32_t reserved;         /* 0 */
} halftone_plan_info;
HALFTONE_API halftone_status halftone_plan_info_init(halftone_plan_info* info, size_t struct_size);

/* Fills an initialised *info. Its strings live as long as the plan. */
HALFTONE_API halftone_status halftone_plan_get_info(const halftone_plan* plan, halftone_plan_info* info);

/* Fills an initialised *problem with what the plan solves. What it points to is owned by the plan. */
HALFTONE_API halftone_status halftone_plan_get_problem(const halftone_plan* plan,
                                                       halftone_attention_problem* problem);

/* The size of the workspace of halftone_schedule() and halftone_run(). */
HALFTONE_API halftone_status halftone_plan_workspace_bytes(const halftone_plan* plan, size_t* bytes);

/* Writes a description for people, NUL-terminated, into `buffer` of `capacity` bytes; *length (optional) is
 * its length without the NUL. NULL with capacity 0 only asks for the length. A text that does not fit:
 * RESOURCE_EXHAUSTED, *length is set and the buffer is untouched. */
HALFTONE_API halftone_status halftone_plan_describe(const halftone_plan* plan, char* buffer, size_t capacity,
                                                    size_t* length);

/* The lengths of one step, on the plan's device. */
typedef struct halftone_sequence_lengths {
  size_t struct_size;
  uint32_t abi_version;
  uint32_t reserved;                 /* 0 */
  const halftone_tensor* cu_q;       /* int32 [batch + 1] from 0, non-decreasing; optional: max_q_len each */
  const halftone_tensor* kv_lengths; /* int32 [batch], tokens in the cache at this time; for plain K and V
                                        give cu_kv instead */
  const halftone_tensor* cu_kv;      /* int32 [batch + 1]: plain K and V only */
  const halftone_tensor* counts;     /* int32 [total_q]: places of each query's list; lists only, which need
                                        no kv_lengths; optional: top_k each */
  const halftone_tensor* extra_counts; /* likewise of the second list */
} halftone_sequence_lengths;
HALFTONE_API halftone_status halftone_sequence_lengths_init(halftone_sequence_lengths* lengths,
                                                            size_t struct_size);

/* Turns lengths into a work list at the start of `workspace` (uint8 [>= workspace_bytes], 256-byte aligned),
 * for every layer of a step. Never allocates; on CUDA never synchronises. CPU: OUT_OF_RANGE or
 * INVALID_ARGUMENT on lengths beyond the plan's bounds. `stream` as for halftone_append().
 * The workspace also holds partial results, so it serves one call at a time: threads, and CUDA streams whose
 * work may overlap, need a workspace each, with its own schedule. CPU: INVALID_ARGUMENT while another call
 * has the workspace. On CUDA nobody sees that. */
HALFTONE_API halftone_status halftone_schedule(const halftone_plan* plan,
                                               const halftone_sequence_lengths* lengths,
                                               const halftone_tensor* workspace, void* stream);

/* The new tokens of a layer, with problem.appends: token t belongs to query t of Q. Request i's go to
 * positions kv_len - q_len, ..., kv_len - 1 of the schedule, through the cache's block_table: lengths that
 * change between halftone_schedule() and halftone_run() move nothing. The bytes are those of
 * halftone_append(), and attention is over them. Values, RoPE and errors are as there; the status is that of
 * halftone_attention_args, which CUDA needs here. */
typedef struct halftone_new_tokens {
  size_t struct_size;
  uint32_t abi_version;
  int32_t rope_pairing;     /* halftone_rope_pairing; NONE is the default */
  const halftone_tensor* k; /* f32, f16 or bf16 [total_q, kv_heads, head_dim]; last dim contiguous */
  const halftone_tensor* v; /* same dtype [total_q, kv_heads, v_dim]; NULL for a latent cache */
  const halftone_tensor* slot_mapping; /* optional int64 [total_q]: a negative entry skips its token; another
                                          one is the slot that the block table has for it (the CPU checks) */
  const halftone_tensor* cos;          /* as in halftone_append_args */
  const halftone_tensor* sin;
  const halftone_tensor* positions; /* int32 [total_q] */
  int32_t advance;  /* 0 or 1: the cache's lengths become the schedule's, each grown by its q_len. Any runs of
                       a step may do it, since they write the same values and no run reads them */
  int32_t reserved; /* 0 */
} halftone_new_tokens;
HALFTONE_API halftone_status halftone_new_tokens_init(halftone_new_tokens* tokens, size_t struct_size);

/* One layer's tensors. With problem.kv, `cache`; with problem.kv_tensors, `k` and `v`. */
typedef struct halftone_attention_args {
  size_t struct_size;
  uint32_t abi_version;
  int32_t cache_settled;      /* 0 or 1: a promise, see AttentionArgs in attention.h */
  const halftone_tensor* q;   /* q_dtype [total_q, q_heads, head_dim]; last dim contiguous */
  const halftone_tensor* out; /* out_dtype [total_q, q_heads, v_dim]; every element is written */
  const halftone_sequence_lengths* lengths; /* as scheduled; optional: kv_lengths from the cache */
  const halftone_paged_kv* cache;           /* instead of k and v */
  const halftone_tensor* k; /* kv_tensors' dtype [total_kv, kv_heads, head_dim]; last dim contiguous;
                               CUDA: rows at multiples of 16 bytes, positive strides */
  const halftone_tensor* v; /* the same dtype [total_kv, kv_heads, v_dim]; likewise */
  const halftone_tensor* alibi_slopes;  /* f32 [q_heads], present exactly with problem.alibi */
  const halftone_tensor* sinks;         /* f32 [q_heads], present exactly with problem.sinks */
  const halftone_tensor* lse;           /* f32 [total_q, q_heads], natural log; exactly with problem.lse */
  const halftone_tensor* status;        /* optional int32 [1], sticky: bit 0 = a bad block-table entry or, on
                                           CUDA, a length beyond the table; bit 2 = more queries than rows of
                                           q; bit 3 = a bad static scale; bit 5 = more keys than rows of k
                                           and v, or than problem.max_total_kv or max_prompt_kv (all
                                           CUDA) */
  const halftone_tensor* indices;       /* int32 [total_q, top_k], exactly with problem.top_k: slots of the
                                           cache, page * page_size + offset; negative ones name nothing. The
                                           cache needs no block_table and no lengths. A slot beyond it sets
                                           bit 0 of the status (clamped, or CUDA) or is OUT_OF_RANGE */
  const halftone_tensor* extra_indices; /* int32 [total_q, extra_top_k]: slots of extra_cache */
  const halftone_paged_kv* extra_cache; /* exactly with problem.extra_top_k */
  const halftone_new_tokens* append;    /* exactly with problem.appends */
  int32_t new_tokens_late; /* 0 or 1: what cache_settled leaves out, see AttentionArgs in attention.h */
  int32_t reserved;        /* 0 */
} halftone_attention_args;
HALFTONE_API halftone_status halftone_attention_args_init(halftone_attention_args* args, size_t struct_size);

/* Computes attention. `workspace` must hold a schedule of this plan and serves one halftone_run() at a time,
 * see halftone_schedule(). A row that sees no key gives zeros and LSE -inf. Online softmax (arXiv:1805.02867)
 * over tiles (arXiv:2205.14135), split-KV merge as in Flash-Decoding; fp32 throughout. Fails with
 * INVALID_ARGUMENT, OUT_OF_RANGE or DEVICE_ERROR. */
HALFTONE_API halftone_status halftone_run(const halftone_plan* plan, const halftone_attention_args* args,
                                          const halftone_tensor* workspace, void* stream);

/* plan, schedule and run with a workspace of its own: CPU only, for scripts and tests. */
HALFTONE_API halftone_status halftone_attend(const halftone_attention_problem* problem,
                                             const halftone_attention_args* args);

/* Merges partial attention results over disjoint keys: out = sum_i w_i out_i with w_i = exp(lse_i - lse).
 * parts: `count` tensors f32, f16 or bf16 [rows, heads, dim]; part_lse: `count` tensors f32 [rows, heads],
 * natural log. out: any of these dtypes; lse: f32 [rows, heads], optional. Parts with LSE -inf contribute
 * nothing. On CUDA at most 512 parts (UNSUPPORTED). */
HALFTONE_API halftone_status halftone_merge(size_t count, const halftone_tensor* const* parts,
                                            const halftone_tensor* const* part_lse,
                                            const halftone_tensor* out, const halftone_tensor* lse,
                                            void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HALFTONE_HALFTONE_H_ */
