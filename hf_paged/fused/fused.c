/* The small operations between a model's products, each in one pass over its numbers.
 *
 *   rms_norm   a row of x is read twice from the first cache, and written once
 *   gate       act(a) * b, a chunk of both at a time
 *   rotary     the halves of each head of q and k turned by their position's angles
 *   add        the sum of two, for the residual stream
 *   spread     rows that lie side by side, further apart
 *   run        operations of any of the C files one after another: a whole layer in one call
 *
 * float32. What becomes of a row depends on nothing but that row: not on the batch, nor on the number of threads.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "../kernels/cpu/exponential.h"

/* Fewer numbers than this are not worth waking other threads for. */
enum { WORTH_SHARING = 1 << 14 };

enum { LANES = 16 };
typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

typedef struct {
  const float *x, *weight; /* [rows, n], [n] */
  float *out;              /* [rows, n] */
  int64_t rows, n;
  int64_t adds_one; /* to the weight */
  int64_t num_threads;
  double eps;
} Norm;

void hf_paged_rms_norm(const Norm *call) {
  int64_t n = call->n, whole = n - n % LANES;
  int threads = call->rows * n < WORTH_SHARING ? 1 : (int)call->num_threads;
  float one = call->adds_one ? 1.0f : 0.0f;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t row = 0; row < call->rows; row++) {
    const float *x = call->x + row * n;
    float *out = call->out + row * n;
    lanes squares = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
      lanes v = *(const lanes *)(x + i);
      squares += v * v;
    }
    float total = 0.0f;
    for (int64_t i = whole; i < n; i++) total += x[i] * x[i];
    for (int64_t i = 0; i < LANES; i++) total += squares[i];
    float scale = 1.0f / sqrtf(total / (float)n + (float)call->eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * (one + call->weight[i]);
  }
}

enum { SILU, GELU_TANH };

typedef struct {
  const float *gate, *up; /* [count] */
  float *out;             /* [count] */
  int64_t count, kind, num_threads;
} Gate;

INLINE float silu(float x) {
  /* past 87 either way exp would leave what `exponential` takes; the result is x or 0 there, to the last bit */
  float bounded = x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x;
  float result = x / (1.0f + exponential(-bounded));
  return x < -87.0f ? 0.0f : result;
}

INLINE float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
}

void hf_paged_gate(const Gate *call) {
  enum { CHUNK = 4096 };
  int threads = call->count < WORTH_SHARING ? 1 : (int)call->num_threads;
  int64_t chunks = (call->count + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t c = 0; c < chunks; c++) {
    int64_t begin = c * CHUNK, size = call->count - begin < CHUNK ? call->count - begin : CHUNK;
    const float *gate = call->gate + begin, *up = call->up + begin;
    float *restrict out = call->out + begin;
    if (call->kind == SILU)
      for (int64_t i = 0; i < size; i++) out[i] = silu(gate[i]) * up[i];
    else
      for (int64_t i = 0; i < size; i++) out[i] = gelu_tanh(gate[i]) * up[i];
  }
}

typedef struct {
  const float *x;                    /* [tokens, heads, dim], dim contiguous */
  float *out;                        /* [tokens, heads, dim], contiguous */
  int64_t heads, token_stride, head_stride;
} Turned;

typedef struct {
  const float *cosines, *sines; /* [tokens, dim] */
  Turned parts[2];              /* q and k */
  int64_t tokens, dim, num_threads;
} Rotary;

void hf_paged_rotary(const Rotary *call) {
  int64_t dim = call->dim, half = dim / 2;
  int64_t numbers = call->tokens * dim * (call->parts[0].heads + call->parts[1].heads);
  int threads = numbers < WORTH_SHARING ? 1 : (int)call->num_threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t token = 0; token < call->tokens; token++) {
    const float *c = call->cosines + token * dim, *s = call->sines + token * dim;
    for (int part = 0; part < 2; part++) {
      const Turned *t = &call->parts[part];
      for (int64_t head = 0; head < t->heads; head++) {
        const float *x = t->x + token * t->token_stride + head * t->head_stride;
        float *restrict out = t->out + (token * t->heads + head) * dim;
        for (int64_t i = 0; i < half; i++) out[i] = x[i] * c[i] - x[half + i] * s[i];
        for (int64_t i = 0; i < half; i++) out[half + i] = x[half + i] * c[half + i] + x[i] * s[half + i];
      }
    }
  }
}

typedef struct {
  const float *a, *b; /* [count] */
  float *out;         /* [count] */
  int64_t count, num_threads;
} Add;

void hf_paged_add(const Add *call) {
  int threads = call->count < WORTH_SHARING ? 1 : (int)call->num_threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < call->count; i++) call->out[i] = call->a[i] + call->b[i];
}

typedef struct {
  const float *from; /* [rows, n] */
  float *to;         /* [rows, n], rows `stride` apart */
  int64_t rows, n, stride, num_threads;
} Spread;

void hf_paged_spread(const Spread *call) {
  int threads = call->rows * call->n < WORTH_SHARING ? 1 : (int)call->num_threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t row = 0; row < call->rows; row++)
    memcpy(call->to + row * call->stride, call->from + row * call->n, (size_t)call->n * sizeof(float));
}

typedef struct {
  void (*function)(const void *call);
  const void *call;
} Operation;

typedef struct {
  const Operation *operations;
  int64_t count;
  double *seconds; /* [count] that each took, or NULL */
} Program;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void hf_paged_run(const Program *program) {
  for (int64_t i = 0; i < program->count; i++) {
    double begin = program->seconds ? now() : 0;
    program->operations[i].function(program->operations[i].call);
    if (program->seconds) program->seconds[i] = now() - begin;
  }
}
