/* Tensors, random data and a plain reference for the C tests of cache and attention. */
#ifndef HALFTONE_TESTS_C_FIXTURE_H_
#define HALFTONE_TESTS_C_FIXTURE_H_

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"

static inline halftone_tensor tensor(void* data, int32_t dtype, int32_t rank, int64_t a, int64_t b,
                                     int64_t c) {
  const int64_t shape[3] = {a, b, c};
  halftone_tensor t;
  CHECK_OK(halftone_tensor_init(&t, sizeof t, data, dtype, rank, shape));
  return t;
}

/* Uniform in [-1, 1): a linear congruential generator, the same on every platform. */
static inline float next_random(uint64_t* state) {
  *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (float)(int32_t)(*state >> 32) * (1.0f / 2147483648.0f);
}

static inline void fill_random(float* x, size_t count, uint64_t seed) {
  size_t i;
  for (i = 0; i < count; ++i) x[i] = next_random(&seed);
}

/* 256-byte aligned; exits when memory is gone. */
static inline void* allocate(size_t bytes) {
  void* p = aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  if (p == NULL) {
    fprintf(stderr, "no memory for %zu bytes\n", bytes);
    exit(2);
  }
  memset(p, 0xff, (bytes + 255) / 256 * 256 + 256);
  return p;
}

static inline double f16_value(uint16_t bits) {
  const double sign = bits >> 15 ? -1.0 : 1.0;
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  return exponent == 0 ? sign * ldexp(mantissa, -24) : sign * ldexp(mantissa + 1024, exponent - 25);
}

/* Attention of one request, straight from the definition. All arrays are contiguous f32: q [q_len, q_heads,
 * dim], k [kv_len, kv_heads, dim], v [kv_len, kv_heads, v_dim]. */
typedef struct reference_problem {
  int q_len, kv_len, q_heads, kv_heads, dim, v_dim;
  int causal, window_left;
  double scale, softcap;
  const float* slopes; /* NULL: none */
  const float* sinks;  /* NULL: none */
} reference_problem;

static inline void reference_attention(const reference_problem* r, const float* q, const float* k,
                                       const float* v, double* out, double* lse) {
  double* logits = (double*)malloc(((size_t)r->kv_len + 1) * sizeof(double));
  int i, h, j, d;
  if (logits == NULL) exit(2);
  for (i = 0; i < r->q_len; ++i) {
    for (h = 0; h < r->q_heads; ++h) {
      const int kv_head = h / (r->q_heads / r->kv_heads);
      const int position = i + r->kv_len - r->q_len;
      const float* query = q + (i * r->q_heads + h) * r->dim;
      double* row = out + (i * r->q_heads + h) * r->v_dim;
      double max = -INFINITY, sum = 0;
      int seen = 0;
      for (j = 0; j < r->kv_len; ++j) {
        const float* key = k + (j * r->kv_heads + kv_head) * r->dim;
        double logit = 0;
        logits[j] = -INFINITY;
        if (r->causal && j > position) continue;
        if (r->window_left >= 0 && j < position - r->window_left) continue;
        for (d = 0; d < r->dim; ++d) logit += (double)query[d] * key[d];
        logit *= r->scale;
        if (r->softcap > 0) logit = r->softcap * tanh(logit / r->softcap);
        if (r->slopes != NULL) logit -= r->slopes[h] * fabs((double)(position - j));
        logits[j] = logit;
        if (logit > max) max = logit;
        seen = 1;
      }
      for (d = 0; d < r->v_dim; ++d) row[d] = 0;
      lse[i * r->q_heads + h] = -INFINITY;
      if (!seen) continue;
      if (r->sinks != NULL && r->sinks[h] > max) max = r->sinks[h];
      for (j = 0; j < r->kv_len; ++j) sum += exp(logits[j] - max);
      if (r->sinks != NULL) sum += exp(r->sinks[h] - max);
      for (j = 0; j < r->kv_len; ++j) {
        const double p = exp(logits[j] - max) / sum;
        for (d = 0; d < r->v_dim; ++d) row[d] += p * v[(j * r->kv_heads + kv_head) * r->v_dim + d];
      }
      lse[i * r->q_heads + h] = max + log(sum);
    }
  }
  free(logits);
}

/* Largest |got - expected|; a difference of infinities of one sign is 0, a NaN counts as infinite. */
static inline double largest_error(const float* got, const double* expected, size_t count) {
  double largest = 0;
  size_t i;
  for (i = 0; i < count; ++i) {
    double e;
    if (isinf(expected[i]) && (double)got[i] == expected[i]) continue;
    e = fabs((double)got[i] - expected[i]);
    if (!(e <= largest)) largest = isnan(e) ? INFINITY : e;
  }
  return largest;
}

#endif /* HALFTONE_TESTS_C_FIXTURE_H_ */
