/* Paged attention on a CPU: two kernels behind one call, over items that threads take one after another.

   item           one kv head of one sequence, some rows, a range of keys that at least one of the rows sees
   row            a query and one of the G query heads of the kv head: row r is query r / G, head r % G
   few rows       K and V are read where they lie, four keys by up to three rows at a time. Bound by memory: an item may
                  have several kv heads, whose keys lie side by side and are read in one go
   many rows      a tile of keys is copied once, transposed, and multiplied with all rows. Bound by products
   partial        items of one sequence that share its keys leave (highest, total, sums) here; joined at the end

   What an item computes depends on nothing but its own sequence: not on the batch, nor on the number of threads.
   Sums are float32. A score that is NaN makes its row NaN, and no other sequence's. */

#include <stdint.h>
#include <string.h>

#include "exponential.h"

#define RESTRICT __restrict__

enum { FLOAT32, BFLOAT16, FLOAT16, INT8 };

enum { LANES = 8 };     /* of the kernel for few rows; half of it where registers are short */
enum { KEY_TILE = 64 }; /* keys at a time */
enum { MAX_ROWS = 96 }; /* of an item */
enum { FEW_ROWS = 12 }; /* up to here keys are read in place */

/* The block of the matrix product: as many accumulators as registers hold, with room for the operands. */
#if defined(__AVX512F__)
enum { WIDE = 16, PRODUCT_ROWS = 8, PRODUCT_VECTORS = 2 };
#elif defined(__AVX__)
enum { WIDE = 8, PRODUCT_ROWS = 6, PRODUCT_VECTORS = 2 };
#else
enum { WIDE = 4, PRODUCT_ROWS = 4, PRODUCT_VECTORS = 4 };
#endif
enum { PRODUCT_COLUMNS = WIDE * PRODUCT_VECTORS };
enum { PADDED_ROWS = (MAX_ROWS + PRODUCT_ROWS - 1) / PRODUCT_ROWS * PRODUCT_ROWS };

typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Wide __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));

#if defined(__clang__)
#define SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Index8 __attribute__((vector_size(32)));
typedef int32_t Index4 __attribute__((vector_size(16)));
#define SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, (Index8){__VA_ARGS__})
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (Index4){__VA_ARGS__})
#endif

static const float LOWEST = -1e30f; /* below any score, and finite: -inf - -inf is NaN */

typedef struct {
  int64_t table_row;
  int64_t token;     /* the sequence's first in the packed batch */
  int64_t position;  /* of that token in the sequence */
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;
  int64_t partial;   /* first row among the partial results; -1: the item has all keys, and writes the result */
  int64_t partial_stride; /* from the partial results of a kv head to those of the next */
  int64_t is_first;  /* the first keys of the sequence: takes the sinks */
  int64_t kv_head, num_heads; /* more than one only where rows are few: all together at most MAX_ROWS */
} Item;

typedef struct {
  int64_t token, row_begin, row_end, kv_head;
  int64_t partial, num_splits; /* of split i: from row partial + i * (row_end - row_begin) */
} Join;

typedef struct {
  const void *query; /* [T, Hq, D], D contiguous */
  void *out;         /* [T, Hq, Dv] */
  const void *keys, *values; /* [slots, Hkv, D], [slots, Hkv, Dv] */
  const float *key_scales, *value_scales; /* [slots, Hkv], or NULL */
  const float *sinks; /* [Hq], or NULL */
  const int32_t *block_table;
  const Item *items;
  const int64_t *bundles; /* [num_bundles + 1]: bundle b is the items bundles[b] .. bundles[b + 1] - 1 */
  const Join *joins;
  float *partials;
  float *scratch;
  int64_t num_bundles, num_joins, num_threads, scratch_size;
  int64_t table_stride, token_stride, head_stride;
  int64_t num_kv_heads, group_size, head_dim, value_dim, block_size;
  int64_t window, chunk; /* 0: none */
  int64_t query_type, key_type, value_type;
  double scale, softcap; /* softcap 0: none */
} Step;

/* One thread's memory, floats. Strides are padded so that products need no tails. */
typedef struct {
  int64_t key_stride, value_stride;
  float *query;    /* [PADDED_ROWS][key_stride], times the scale */
  float *scores;   /* [PADDED_ROWS][SCORE_STRIDE] */
  float *sums;     /* [PADDED_ROWS][value_stride] */
  float *highest, *total, *decay; /* [PADDED_ROWS] */
  float *key_scales, *value_scales; /* [KEY_TILE] */
  float *keys;     /* converted [KEY_TILE][key_stride] */
  float *packed;   /* transposed [key_stride][KEY_TILE] */
  float *values;   /* [KEY_TILE][value_stride] */
} Scratch;

enum { SCORE_STRIDE = KEY_TILE + LANES };

INLINE int64_t padded(int64_t size) { return (size + PRODUCT_COLUMNS - 1) / PRODUCT_COLUMNS * PRODUCT_COLUMNS; }

static int64_t lay_out(Scratch *s, float *base, int64_t head_dim, int64_t value_dim) {
  s->key_stride = padded(head_dim);
  s->value_stride = padded(value_dim);
  int64_t offset = 0;
#define PLACE(name, size) (s->name = base + offset, offset += (size))
  PLACE(query, PADDED_ROWS * s->key_stride);
  PLACE(scores, PADDED_ROWS * SCORE_STRIDE);
  PLACE(sums, PADDED_ROWS * s->value_stride);
  PLACE(highest, PADDED_ROWS);
  PLACE(total, PADDED_ROWS);
  PLACE(decay, PADDED_ROWS);
  PLACE(key_scales, KEY_TILE);
  PLACE(value_scales, KEY_TILE);
  PLACE(keys, KEY_TILE * s->key_stride);
  PLACE(packed, KEY_TILE * s->key_stride);
  PLACE(values, KEY_TILE * s->value_stride);
#undef PLACE
  return (offset + 31) / 16 * 16; /* and a cache line between threads */
}

/* ---- numbers ---- */

INLINE float from_bfloat16(uint16_t x) {
  Bits bits = {.u = (uint32_t)x << 16};
  return bits.f;
}

INLINE float from_float16(uint16_t x) {
  Bits bits = {.u = (uint32_t)(x & 0x7fffu) << 13};
  bits.f *= 5.192296858534828e33f; /* 2^112, the difference of the exponents' biases: subnormals come right, too */
  bits.u |= (x & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  bits.u |= (uint32_t)(x & 0x8000u) << 16;
  return bits.f;
}

INLINE uint16_t to_bfloat16(float x) {
  Bits bits = {.f = x};
  uint32_t rounded = (bits.u + 0x7fffu + (bits.u >> 16 & 1u)) >> 16;
  return (uint16_t)(x != x ? 0x7fc0u : rounded);
}

INLINE uint16_t to_float16(float x) {
  Bits bits = {.f = x};
  uint32_t sign = bits.u >> 16 & 0x8000u;
  bits.u &= 0x7fffffffu;
  if (bits.u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (bits.u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or more */
  if (bits.u < 0x38800000u) { /* subnormal: adding 0.5 shifts the bits into place, and rounds */
    bits.f += 0.5f;
    return (uint16_t)(sign | (bits.u - 0x3f000000u));
  }
  return (uint16_t)(sign | ((bits.u - 0x38000000u + 0xfffu + (bits.u >> 13 & 1u)) >> 13));
}

/* n numbers of a type, times a factor */
static void widen(float *RESTRICT to, const void *from, int64_t type, int64_t n, float factor) {
  if (type == FLOAT32) {
    const float *x = from;
    for (int64_t i = 0; i < n; i++) to[i] = x[i] * factor;
  } else if (type == BFLOAT16) {
    const uint16_t *x = from;
    for (int64_t i = 0; i < n; i++) to[i] = from_bfloat16(x[i]) * factor;
  } else if (type == FLOAT16) {
    const uint16_t *x = from;
    for (int64_t i = 0; i < n; i++) to[i] = from_float16(x[i]) * factor;
  } else {
    const int8_t *x = from;
    for (int64_t i = 0; i < n; i++) to[i] = (float)x[i] * factor;
  }
}

INLINE int64_t bytes_of(int64_t type) { return type == FLOAT32 ? 4 : type == INT8 ? 1 : 2; }

static void narrow(void *to, const float *from, int64_t type, int64_t n, float factor) {
  if (type == FLOAT32) {
    float *x = to;
    for (int64_t i = 0; i < n; i++) x[i] = from[i] * factor;
  } else if (type == BFLOAT16) {
    uint16_t *x = to;
    for (int64_t i = 0; i < n; i++) x[i] = to_bfloat16(from[i] * factor);
  } else {
    uint16_t *x = to;
    for (int64_t i = 0; i < n; i++) x[i] = to_float16(from[i] * factor);
  }
}

/* ---- what both kernels share ---- */

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t first_seen(const Step *step, int64_t position) {
  int64_t first = 0;
  if (step->window) first = larger(first, position - step->window + 1);
  if (step->chunk) first = larger(first, position / step->chunk * step->chunk);
  return first;
}

/* Rows of the cache, slot * Hkv + head, of the n keys from `begin` on. */
INLINE void find_rows(const Step *step, const Item *item, int64_t begin, int64_t n, int64_t *rows) {
  const int32_t *table = step->block_table + item->table_row * step->table_stride;
  int64_t block = begin / step->block_size, offset = begin % step->block_size;
  for (int64_t i = 0; i < n; block++, offset = 0) {
    int64_t slot = table[block] * step->block_size + offset;
    int64_t end = smaller(n, i + step->block_size - offset);
    for (; i < end; i++, slot++) rows[i] = slot * step->num_kv_heads + item->kv_head;
  }
}

typedef struct {
  int64_t head, token; /* of the queries */
} Place;

/* Of row r of a kv head of the sequence that begins at `token`. */
INLINE Place place_of(const Step *step, int64_t kv_head, int64_t token, int64_t r) {
  return (Place){kv_head * step->group_size + r % step->group_size, token + r / step->group_size};
}

/* Of row i of an item: its kv heads' rows come one after another. */
INLINE Place item_place(const Step *step, const Item *item, int64_t i) {
  int64_t num_rows = item->row_end - item->row_begin;
  return place_of(step, item->kv_head + i / num_rows, item->token, item->row_begin + i % num_rows);
}

INLINE char *out_of(const Step *step, Place place) {
  int64_t row = place.token * step->num_kv_heads * step->group_size + place.head;
  return (char *)step->out + row * step->value_dim * bytes_of(step->query_type);
}

INLINE int64_t rows_of(const Item *item) { return (item->row_end - item->row_begin) * item->num_heads; }

static void begin_item(const Step *step, const Item *item, Scratch *s) {
  for (int64_t i = 0; i < rows_of(item); i++) {
    Place place = item_place(step, item, i);
    const char *query = step->query;
    query += (place.token * step->token_stride + place.head * step->head_stride) * bytes_of(step->query_type);
    widen(s->query + i * s->key_stride, query, step->query_type, step->head_dim, (float)step->scale);
    int has_sink = step->sinks && item->is_first;
    s->highest[i] = has_sink ? step->sinks[place.head] : LOWEST;
    s->total[i] = has_sink ? 1.0f : 0.0f; /* a key seen by all, whose value is zero */
  }
}

static void end_item(const Step *step, const Item *item, Scratch *s) {
  int64_t num_rows = item->row_end - item->row_begin;
  if (item->partial >= 0) {
    for (int64_t i = 0; i < rows_of(item); i++) {
      int64_t row = item->partial + i / num_rows * item->partial_stride + i % num_rows;
      float *partial = step->partials + row * (step->value_dim + 2);
      partial[0] = s->highest[i];
      partial[1] = s->total[i];
      memcpy(partial + 2, s->sums + i * s->value_stride, step->value_dim * sizeof(float));
    }
    return;
  }
  for (int64_t i = 0; i < rows_of(item); i++) {
    char *out = out_of(step, item_place(step, item, i));
    narrow(out, s->sums + i * s->value_stride, step->query_type, step->value_dim, 1.0f / s->total[i]);
  }
}

/* Scores of a row and a tile of n keys, of them seen: first .. last - 1, become weights; n is padded to `width`. */
INLINE void soften(const Step *step, Scratch *s, int64_t row, int64_t first, int64_t last, int64_t width) {
  float *RESTRICT x = s->scores + row * SCORE_STRIDE;
  if (step->key_scales) {
    const float *RESTRICT factors = s->key_scales;
    for (int64_t i = 0; i < width; i++) x[i] *= factors[i];
  }
  if (step->softcap != 0) {
    float cap = (float)step->softcap;
    for (int64_t i = 0; i < width; i++) x[i] = cap * hyperbolic_tangent(x[i] / cap);
  }
  for (int64_t i = 0; i < first; i++) x[i] = -__builtin_inff();
  for (int64_t i = last; i < width; i++) x[i] = -__builtin_inff();

  float before = s->highest[row], highest = before, total = 0;
#pragma omp simd reduction(max : highest)
  for (int64_t i = 0; i < width; i++) highest = x[i] > highest ? x[i] : highest;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < width; i++) {
    float weight = exponential(x[i] - highest);
    x[i] = weight;
    total += weight;
  }
  float decay = exponential(before - highest);
  s->highest[row] = highest;
  s->decay[row] = decay;
  s->total[row] = s->total[row] * decay + total;
  if (step->value_scales) {
    const float *RESTRICT factors = s->value_scales;
    for (int64_t i = first; i < last; i++) x[i] *= factors[i];
  }
}

/* soften() for the rows of one kv head of an item, of which the first is row `first_row` */
static void soften_rows(const Step *step, const Item *item, Scratch *s, int64_t first_row, int64_t begin, int64_t n,
                        int64_t width) {
  int64_t num_rows = item->row_end - item->row_begin;
  for (int64_t i = 0; i < num_rows; i++) {
    int64_t position = item->position + (item->row_begin + i) / step->group_size;
    int64_t first = larger(0, first_seen(step, position) - begin), last = smaller(n, position + 1 - begin);
    first = smaller(first, n), last = larger(last, first);
    soften(step, s, first_row + i, first, last, width);
  }
}

/* Those of the kv head that is the `head`-th of an item. */
INLINE void load_scales(const Step *step, Scratch *s, const int64_t *rows, int64_t n, int64_t head) {
  if (step->key_scales) {
    for (int64_t i = 0; i < n; i++) s->key_scales[i] = step->key_scales[rows[i] + head];
    for (int64_t i = n; i < KEY_TILE; i++) s->key_scales[i] = 0;
  }
  if (step->value_scales)
    for (int64_t i = 0; i < n; i++) s->value_scales[i] = step->value_scales[rows[i] + head];
}

/* ---- few rows ---- */

/* Lanes of four sums -> the four sums, twice. */
INLINE Lanes add_lanes(Lanes a, Lanes b, Lanes c, Lanes d) {
  Lanes ab = SHUFFLE8(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE8(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  Lanes cd = SHUFFLE8(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE8(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
  Lanes halves = SHUFFLE8(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE8(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  return halves + SHUFFLE8(halves, halves, 4, 5, 6, 7, 0, 1, 2, 3);
}

/* Scores of `num_rows`, a constant, and four keys. */
INLINE void score_four(const int num_rows, const Scratch *s, int64_t row, const float *const *keys, int64_t at,
                       int64_t head_dim) {
  const float *query = s->query + row * s->key_stride;
  Lanes sums[3][4];
#pragma GCC unroll 3
  for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) sums[r][k] = (Lanes){0};
  int64_t d = 0;
  for (; d + LANES <= head_dim; d += LANES) {
    Lanes q[3];
#pragma GCC unroll 3
    for (int r = 0; r < num_rows; r++) q[r] = *(const Lanes *)(query + r * s->key_stride + d);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      Lanes key = *(const Lanes *)(keys[k] + d);
#pragma GCC unroll 3
      for (int r = 0; r < num_rows; r++) sums[r][k] += q[r] * key;
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < num_rows; r++) {
    float *scores = s->scores + (row + r) * SCORE_STRIDE + at;
    *(Lanes *)scores = add_lanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    for (int64_t tail = d; tail < head_dim; tail++)
      for (int k = 0; k < 4; k++) scores[k] += query[r * s->key_stride + tail] * keys[k][tail];
  }
}

/* What is needed next of the cache: the keys of a tile, then its values, of all kv heads of an item. They are asked for a
   row at a time while others are used, since a core waits for few lines at once. */
typedef struct {
  int64_t rows[KEY_TILE];
  int64_t n;
  const char *cache[2];        /* keys, values: those of the item's first kv head */
  int64_t step[2], bytes[2];   /* from a row to the next; of a row what is needed */
  int64_t asked;               /* rows so far: n of keys, then n of values */
  int64_t per_score, each_key; /* rows to ask for beside the scores of four keys; one each so many keys that are weighed */
} Ahead;

enum { LINE = 64 };

/* Of `item`, from key `begin` on. Meanwhile `keys` of each of `heads` are used, and their values in so many `blocks`. */
static void look_ahead(const Step *step, Ahead *a, const Item *item, int64_t begin, int64_t keys, int64_t heads,
                       int64_t blocks) {
  a->n = smaller(KEY_TILE, item->key_end - begin);
  a->asked = 0;
  find_rows(step, item, begin, a->n, a->rows);
  a->cache[0] = step->keys, a->cache[1] = step->values;
  a->step[0] = step->head_dim * bytes_of(step->key_type);
  a->step[1] = step->value_dim * bytes_of(step->value_type);
  for (int i = 0; i < 2; i++) a->bytes[i] = a->step[i] * item->num_heads;
  a->per_score = (a->n * 4 + heads * keys - 1) / (heads * keys);
  a->each_key = larger(1, heads * keys * blocks / a->n);
}

INLINE void ask(Ahead *a, int64_t rows) {
  for (; rows > 0 && a->asked < 2 * a->n; rows--, a->asked++) {
    int is_value = a->asked >= a->n;
    const char *row = a->cache[is_value] + a->rows[a->asked - is_value * a->n] * a->step[is_value];
    for (int64_t byte = 0; byte < a->bytes[is_value]; byte += LINE) __builtin_prefetch(row + byte);
  }
}

INLINE void score(const int num_rows, const Scratch *s, int64_t row, const float *const *keys, int64_t width,
                  int64_t head_dim, Ahead *ahead) {
  for (int64_t at = 0; at < width; at += 4) {
    if (ahead) ask(ahead, ahead->per_score);
    score_four(num_rows, s, row, keys + at, at, head_dim);
  }
}

/* Adds the weighted values of n keys, `num_vectors` of their numbers from `column` on; both counts are constants. */
INLINE void weigh_block(const int num_rows, const int num_vectors, const Scratch *s, int64_t row,
                        const float *const *values, int64_t n, int64_t column, Ahead *ahead) {
  Lanes sums[3][4];
  float *out = s->sums + row * s->value_stride + column;
  const float *weights = s->scores + row * SCORE_STRIDE;
#pragma GCC unroll 3
  for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++)
      sums[r][v] = *(const Lanes *)(out + r * s->value_stride + v * LANES) * s->decay[row + r];
  int64_t until = 0, each_key = ahead ? ahead->each_key : n;
  for (int64_t k = 0; k < n; k++) {
    const float *value = values[k] + column;
    if (ahead && until-- == 0) ask(ahead, 1), until = each_key - 1;
    Lanes x[4];
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++) x[v] = *(const Lanes *)(value + v * LANES);
#pragma GCC unroll 3
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < num_vectors; v++) sums[r][v] += x[v] * weights[r * SCORE_STRIDE + k];
  }
#pragma GCC unroll 3
  for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++) *(Lanes *)(out + r * s->value_stride + v * LANES) = sums[r][v];
}

INLINE void weigh(const int num_rows, const Scratch *s, int64_t row, const float *const *values, int64_t n,
                  int64_t value_dim, Ahead *ahead) {
  int64_t column = 0;
  for (; column + 4 * LANES <= value_dim; column += 4 * LANES)
    weigh_block(num_rows, 4, s, row, values, n, column, ahead);
  for (; column + LANES <= value_dim; column += LANES) weigh_block(num_rows, 1, s, row, values, n, column, ahead);
  for (; column < value_dim; column++)
    for (int r = 0; r < num_rows; r++) {
      float *out = s->sums + (row + r) * s->value_stride + column;
      float sum = *out * s->decay[row + r];
      for (int64_t k = 0; k < n; k++) sum += s->scores[(row + r) * SCORE_STRIDE + k] * values[k][column];
      *out = sum;
    }
}

/* Where float32 rows are, or where they were converted to. */
INLINE void point_at(const float **pointers, const void *cache, int64_t type, int64_t width, const int64_t *rows,
                     int64_t n, float *converted, int64_t stride) {
  if (type == FLOAT32) {
    for (int64_t i = 0; i < n; i++) pointers[i] = (const float *)cache + rows[i] * width;
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    pointers[i] = converted + i * stride;
    widen(converted + i * stride, (const char *)cache + rows[i] * width * bytes_of(type), type, width, 1.0f);
  }
}

/* DO(R) for R rows from `row` on, until all are done: three at a time, and 2 + 2 instead of 3 + 1. */
#define IN_THREES(num_rows, DO)                                  \
  for (int64_t row = 0, left; (left = (num_rows) - row) > 0;) {  \
    if (left == 1) DO(1), row += 1;                              \
    else if (left == 2 || left == 4) DO(2), row += 2;            \
    else DO(3), row += 3;                                        \
  }

/* `next`: the item that comes after this one, or NULL. `ahead`: this item's first keys; then those of the next. */
static void attend_few(const Step *step, const Item *item, const Item *next, Ahead *ahead, Scratch *s) {
  int64_t num_rows = item->row_end - item->row_begin;
  const float *keys[KEY_TILE], *values[KEY_TILE];
  memset(s->sums, 0, rows_of(item) * s->value_stride * sizeof(float));
  int64_t key_bytes = step->head_dim * bytes_of(step->key_type);
  int64_t value_bytes = step->value_dim * bytes_of(step->value_type);
  int64_t blocks = larger(1, step->value_dim / (4 * LANES));
  for (int64_t begin = item->key_begin; begin < item->key_end; begin += KEY_TILE) {
    int64_t rows[KEY_TILE], n = ahead->n;
    memcpy(rows, ahead->rows, n * sizeof *rows);
    if (begin + KEY_TILE < item->key_end) look_ahead(step, ahead, item, begin + KEY_TILE, n, item->num_heads, blocks);
    else if (next) look_ahead(step, ahead, next, next->key_begin, n, item->num_heads, blocks);
    else ahead->n = 0;
    int64_t width = (n + LANES - 1) / LANES * LANES;
    for (int64_t head = 0; head < item->num_heads; head++) {
      int64_t first_row = head * num_rows;
      load_scales(step, s, rows, n, head);
      point_at(keys, (const char *)step->keys + head * key_bytes, step->key_type, step->head_dim, rows, n, s->keys,
               s->key_stride);
      for (int64_t i = n; i < width; i++) keys[i] = keys[n - 1];
#define SCORE(R) score(R, s, first_row + row, keys, width, step->head_dim, row ? NULL : ahead)
      IN_THREES(num_rows, SCORE);
#undef SCORE
      soften_rows(step, item, s, first_row, begin, n, width);
      point_at(values, (const char *)step->values + head * value_bytes, step->value_type, step->value_dim, rows, n,
               s->values, s->value_stride);
#define WEIGH(R) weigh(R, s, first_row + row, values, n, step->value_dim, row ? NULL : ahead)
      IN_THREES(num_rows, WEIGH);
#undef WEIGH
    }
  }
}

/* ---- many rows ---- */

/* c[PRODUCT_ROWS][PRODUCT_COLUMNS] = c * decay + a @ b; without decay, c is only written. */
INLINE void product_block(const float *RESTRICT a, int64_t a_stride, const float *RESTRICT b, int64_t b_stride,
                          int64_t depth, float *RESTRICT c, int64_t c_stride, const float *decay) {
  Wide sums[PRODUCT_ROWS][PRODUCT_VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < PRODUCT_ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PRODUCT_VECTORS; v++)
      if (decay) sums[r][v] = *(const Wide *)(c + r * c_stride + v * WIDE) * decay[r];
      else sums[r][v] = (Wide){0};
  for (int64_t k = 0; k < depth; k++) {
    Wide x[PRODUCT_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < PRODUCT_VECTORS; v++) x[v] = *(const Wide *)(b + k * b_stride + v * WIDE);
#pragma GCC unroll 8
    for (int r = 0; r < PRODUCT_ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < PRODUCT_VECTORS; v++) sums[r][v] += x[v] * a[r * a_stride + k];
  }
#pragma GCC unroll 8
  for (int r = 0; r < PRODUCT_ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PRODUCT_VECTORS; v++) *(Wide *)(c + r * c_stride + v * WIDE) = sums[r][v];
}

/* All strides and columns are multiples of a block's, and so is what is there of rows. */
INLINE void product(int64_t rows, int64_t columns, const float *a, int64_t a_stride, const float *b,
                    int64_t b_stride, int64_t depth, float *c, int64_t c_stride, const float *decay) {
  for (int64_t j = 0; j < columns; j += PRODUCT_COLUMNS)
    for (int64_t i = 0; i < rows; i += PRODUCT_ROWS)
      product_block(a + i * a_stride, a_stride, b + j, b_stride, depth, c + i * c_stride + j, c_stride,
                    decay ? decay + i : 0);
}

/* keys[i][d] -> packed[d][i], zeros for i from n up to `width` */
INLINE void transpose(const float *const *keys, int64_t n, int64_t width, int64_t head_dim, float *RESTRICT packed) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    int64_t d = 0;
    for (; d + 4 <= head_dim; d += 4) {
      Quad a = *(const Quad *)(keys[i] + d), b = *(const Quad *)(keys[i + 1] + d);
      Quad c = *(const Quad *)(keys[i + 2] + d), e = *(const Quad *)(keys[i + 3] + d);
      Quad ab_low = SHUFFLE4(a, b, 0, 4, 1, 5), ab_high = SHUFFLE4(a, b, 2, 6, 3, 7);
      Quad ce_low = SHUFFLE4(c, e, 0, 4, 1, 5), ce_high = SHUFFLE4(c, e, 2, 6, 3, 7);
      *(Quad *)(packed + d * KEY_TILE + i) = SHUFFLE4(ab_low, ce_low, 0, 1, 4, 5);
      *(Quad *)(packed + (d + 1) * KEY_TILE + i) = SHUFFLE4(ab_low, ce_low, 2, 3, 6, 7);
      *(Quad *)(packed + (d + 2) * KEY_TILE + i) = SHUFFLE4(ab_high, ce_high, 0, 1, 4, 5);
      *(Quad *)(packed + (d + 3) * KEY_TILE + i) = SHUFFLE4(ab_high, ce_high, 2, 3, 6, 7);
    }
    for (; d < head_dim; d++)
      for (int64_t k = i; k < i + 4; k++) packed[d * KEY_TILE + k] = keys[k][d];
  }
  for (; i < width; i++)
    for (int64_t d = 0; d < head_dim; d++) packed[d * KEY_TILE + i] = i < n ? keys[i][d] : 0.0f;
}

static void attend_many(const Step *step, const Item *item, Scratch *s) {
  int64_t num_rows = item->row_end - item->row_begin;
  int64_t all_rows = (num_rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS * PRODUCT_ROWS;
  int64_t rows[KEY_TILE];
  const float *keys[KEY_TILE];
  memset(s->sums, 0, all_rows * s->value_stride * sizeof(float));
  memset(s->query + num_rows * s->key_stride, 0, (all_rows - num_rows) * s->key_stride * sizeof(float));
  memset(s->scores + num_rows * SCORE_STRIDE, 0, (all_rows - num_rows) * SCORE_STRIDE * sizeof(float));
  for (int64_t r = num_rows; r < all_rows; r++) s->decay[r] = 0;
  for (int64_t begin = item->key_begin; begin < item->key_end; begin += KEY_TILE) {
    int64_t n = smaller(KEY_TILE, item->key_end - begin), width = padded(n);
    find_rows(step, item, begin, n, rows);
    load_scales(step, s, rows, n, 0);
    point_at(keys, step->keys, step->key_type, step->head_dim, rows, n, s->keys, s->key_stride);
    transpose(keys, n, width, step->head_dim, s->packed);
    product(all_rows, width, s->query, s->key_stride, s->packed, KEY_TILE, step->head_dim, s->scores, SCORE_STRIDE, 0);
    soften_rows(step, item, s, 0, begin, n, width);
    int64_t value_bytes = step->value_dim * bytes_of(step->value_type);
    for (int64_t i = 0; i < n; i++) {
      float *value = s->values + i * s->value_stride;
      widen(value, (const char *)step->values + rows[i] * value_bytes, step->value_type, step->value_dim, 1.0f);
    }
    product(all_rows, s->value_stride, s->scores, SCORE_STRIDE, s->values, s->value_stride, n, s->sums,
            s->value_stride, s->decay);
  }
}

/* ---- the whole step ---- */

static void join(const Step *step, const Join *joined) {
  int64_t num_rows = joined->row_end - joined->row_begin, width = step->value_dim + 2;
  for (int64_t i = 0; i < num_rows; i++) {
    float *first = step->partials + (joined->partial + i) * width; /* the sum is made in the first split's place */
    float highest = first[0];
    for (int64_t split = 1; split < joined->num_splits; split++) {
      float other = first[split * num_rows * width];
      highest = other > highest ? other : highest;
    }
    float total = 0;
    for (int64_t split = 0; split < joined->num_splits; split++) {
      const float *partial = first + split * num_rows * width;
      float decay = exponential(partial[0] - highest);
      total += partial[1] * decay;
      for (int64_t d = 2; d < width; d++) first[d] = (split ? first[d] : 0.0f) + partial[d] * decay;
    }
    char *out = out_of(step, place_of(step, joined->kv_head, joined->token, joined->row_begin + i));
    narrow(out, first + 2, step->query_type, step->value_dim, 1.0f / total);
  }
}

int64_t hf_paged_max_rows(void) { return MAX_ROWS; }
int64_t hf_paged_few_rows(void) { return FEW_ROWS; }
int64_t hf_paged_key_tile(void) { return KEY_TILE; }

/* Floats of scratch memory that each thread needs. */
int64_t hf_paged_scratch_size(int64_t head_dim, int64_t value_dim) {
  Scratch scratch;
  return lay_out(&scratch, 0, head_dim, value_dim);
}

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* Takes bundles until there are none. The next one is taken before this one is done, to ask for its keys in time. */
static void attend_bundles(const Step *step, int64_t *taken, Scratch *scratch) {
  Ahead ahead;
  ahead.n = 0;
  int64_t bundle = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
  while (bundle < step->num_bundles) {
    int64_t following = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED), end = step->bundles[bundle + 1];
    for (int64_t i = step->bundles[bundle]; i < end; i++) {
      const Item *item = step->items + i, *next = item + 1;
      if (i + 1 == end) next = following < step->num_bundles ? step->items + step->bundles[following] : NULL;
      if (next && next->row_end - next->row_begin > FEW_ROWS) next = NULL;
      begin_item(step, item, scratch);
      if (item->row_end - item->row_begin > FEW_ROWS) {
        attend_many(step, item, scratch);
        ahead.n = 0;
      } else {
        if (ahead.n == 0) look_ahead(step, &ahead, item, item->key_begin, 1, 1, 1);
        attend_few(step, item, next, &ahead, scratch);
      }
      end_item(step, item, scratch);
    }
    bundle = following;
  }
}

void hf_paged_attend(const Step *step) {
  int64_t taken = 0;
  int num_threads = step->num_bundles > 1 ? (int)step->num_threads : 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Scratch scratch;
    lay_out(&scratch, step->scratch + omp_get_thread_num() * step->scratch_size, step->head_dim, step->value_dim);
    attend_bundles(step, &taken, &scratch);
    if (step->num_joins) {
#pragma omp barrier /* all partial results are there */
#pragma omp for schedule(static)
      for (int64_t i = 0; i < step->num_joins; i++) join(step, step->joins + i);
    }
  }
}
