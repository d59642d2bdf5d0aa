/* y = x W^T + b for many rows, on weights as they lie in memory; linear.c is faster for fewer.
 *
 *        p ->                       p ->                     n ->
 *   x    . . . .   ROWS         W   . . . .   COLUMNS   y    . . . . . . . .
 *        . . . .   of them          . . . .             m    . . [tile] . .
 *
 * COLUMNS rows of W, a part of their length, are turned so that each step along p finds its COLUMNS values side by side.
 * They stay in the near caches while the rows of x pass, ROWS at a time: a tile of ROWS * COLUMNS sums lies in registers,
 * and a step multiplies one value of each row with all of them. Turning is paid once for up to MOST_ROWS rows, and what
 * will be turned next is fetched meanwhile. Reading what was turned from the second cache costs less than adding to y
 * once more would. The order of a sum depends on k alone: a row's result doesn't depend on the rows beside it, on n, or
 * on the number of threads.
 */
#include <stddef.h>
#include <string.h>

#include "product.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

/* A tile's sums, the values of one step and one of x have to fit the registers. */
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
#define VECTORS 2
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6
#define VECTORS 2
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 8
#define VECTORS 3
#else
#define LANES 4
#define ROWS 4
#define VECTORS 2
#endif
#define COLUMNS (VECTORS * LANES)
#define DEPTH 576     /* of the length of W's rows that is turned at a time: DEPTH * COLUMNS values fit the second cache */
#define MOST_ROWS 512 /* of x that are taken past it: DEPTH values of each fit the third cache */
#define LINE 64       /* bytes of a cache line */

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float sums __attribute__((vector_size(LANES * 4)));

/* Where a tile's sums go. */
typedef struct {
    float *out;
    const float *bias; /* added with the last part of the length; or NULL */
    int64_t stride;
    int count; /* columns that there are */
    int is_first;
} target;

/* `rows` is a constant where this is inlined. */
static inline __attribute__((always_inline)) void tile(int rows, const float *x, int64_t stride, const float *w,
                                                       int64_t depth, const target *t) {
    sums s[ROWS][VECTORS];
    for (int i = 0; i < rows; i++) {
        __builtin_prefetch(t->out + i * t->stride, 1);
        for (int v = 0; v < VECTORS; v++) s[i][v] = (sums){0};
    }
    for (int64_t p = 0; p < depth; p++, w += COLUMNS) {
        sums values[VECTORS];
        for (int v = 0; v < VECTORS; v++) values[v] = *(const sums *)(w + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < VECTORS; v++) s[i][v] += x[i * stride + p] * values[v];
    }
    if (t->count == COLUMNS) {
        for (int i = 0; i < rows; i++) {
            lanes *out = (lanes *)(t->out + i * t->stride);
            for (int v = 0; v < VECTORS; v++) {
                sums total = s[i][v];
                if (!t->is_first) total += out[v];
                if (t->bias) total += ((const lanes *)t->bias)[v];
                out[v] = total;
            }
        }
        return;
    }
    float edge[ROWS][COLUMNS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < VECTORS; v++) ((lanes *)edge[i])[v] = s[i][v];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < t->count; j++) {
            float *out = t->out + i * t->stride + j;
            *out = (t->is_first ? edge[i][j] : *out + edge[i][j]) + (t->bias ? t->bias[j] : 0);
        }
}

static void last_tile(int64_t rows, const float *x, int64_t stride, const float *w, int64_t depth, const target *t) {
    switch (rows) {
#define CASE(R)                              \
    case R:                                  \
        tile(R, x, stride, w, depth, t);     \
        break;
        CASE(1)
        CASE(2)
        CASE(3)
#if ROWS > 4
        CASE(4)
        CASE(5)
#endif
#if ROWS > 6
        CASE(6)
        CASE(7)
#endif
#if ROWS > 8
        CASE(8)
        CASE(9)
        CASE(10)
        CASE(11)
#endif
#undef CASE
    }
}

#if defined(__AVX__)
/* Eight values of each of eight rows `from`, `stride` apart: their columns go to `to`, COLUMNS apart. */
static inline void turn(const float *from, int64_t stride, float *to) {
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        __m256 a = _mm256_loadu_ps(from + i * stride), b = _mm256_loadu_ps(from + (i + 1) * stride);
        pairs[i] = _mm256_unpacklo_ps(a, b);
        pairs[i + 1] = _mm256_unpackhi_ps(a, b);
    }
    for (int half = 0; half < 8; half += 4)
        for (int i = 0; i < 2; i++) {
            fours[half + 2 * i] = _mm256_shuffle_ps(pairs[half + i], pairs[half + 2 + i], 0x44);
            fours[half + 2 * i + 1] = _mm256_shuffle_ps(pairs[half + i], pairs[half + 2 + i], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * COLUMNS, _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20));
        _mm256_storeu_ps(to + (4 + i) * COLUMNS, _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31));
    }
}
#endif

/* `depth` values of each of `count` rows, `stride` apart, side by side; zeros for the columns that there aren't. */
static void turn_all(const float *from, int64_t stride, int64_t depth, int count, float *to) {
    int64_t done = 0;
#if defined(__AVX__)
    if (count == COLUMNS) {
        done = depth / 8 * 8;
        for (int j = 0; j < COLUMNS; j += 8)
            for (int64_t p = 0; p < done; p += 8) turn(from + j * stride + p, stride, to + p * COLUMNS + j);
    }
#endif
    for (int64_t p = done; p < depth; p++)
        for (int j = 0; j < COLUMNS; j++) to[p * COLUMNS + j] = j < count ? from[j * stride + p] : 0;
}

/* Lines of W that will be turned next: they are asked for a few at a time while others are multiplied. */
typedef struct {
    const char *at;
    int64_t stride, length; /* bytes: from row to row, and of a row what is needed */
    int64_t row, byte;
} ahead;

static inline void fetch(ahead *a, int64_t count) {
    for (; count > 0 && a->row < COLUMNS; count--) {
        __builtin_prefetch(a->at + a->row * a->stride + a->byte, 0, 2);
        a->byte += LINE;
        if (a->byte >= a->length) {
            a->byte = 0;
            a->row++;
        }
    }
}

/* Groups of COLUMNS rows of W, from `first` to before `end`, times rows `m0` to before `m1` of x. */
static void multiply(const product *call, const part *p, int64_t first, int64_t end, int64_t m0, int64_t m1) {
    float turned[DEPTH * COLUMNS] __attribute__((aligned(64)));
    float wide[COLUMNS * DEPTH];
    int64_t size = call->is_bf16 ? 2 : 4, num_tiles = (m1 - m0 + ROWS - 1) / ROWS;
    int64_t k = call->k, num_depths = (k + DEPTH - 1) / DEPTH, step = ((k + num_depths - 1) / num_depths + 7) / 8 * 8;
    for (int64_t k0 = 0; k0 < k; k0 += step) {
        int64_t depth = k - k0 < step ? k - k0 : step;
        for (int64_t g = first; g < end; g++) {
            int64_t column = g * COLUMNS;
            int count = (int)(p->n - column < COLUMNS ? p->n - column : COLUMNS);
            if (call->is_bf16) {
                const uint16_t *weight = (const uint16_t *)p->weight + column * k + k0;
                for (int j = 0; j < count; j++) widen(weight + j * k, wide + j * DEPTH, depth);
                turn_all(wide, DEPTH, depth, count, turned);
            } else {
                turn_all((const float *)p->weight + column * k + k0, k, depth, count, turned);
            }
            target t = {.stride = p->n, .count = count, .is_first = k0 == 0};
            t.bias = p->bias && k0 + depth == k ? p->bias + column : NULL;
            const float *x = call->x + m0 * call->stride + k0;
            t.out = p->out + m0 * p->n + column;
            int is_last = g + 1 == end;
            int64_t row = is_last ? first * COLUMNS : column + COLUMNS, from = is_last ? k0 + depth : k0;
            ahead next = {(const char *)p->weight + (row * k + from) * size, k * size, depth * size, 0, 0};
            if (from >= k || row + COLUMNS > p->n) next.row = COLUMNS; /* nothing there */
            int64_t fetches = (COLUMNS * ((next.length + LINE - 1) / LINE) + num_tiles - 1) / num_tiles;
            int64_t m = m0;
            for (; m + ROWS <= m1; m += ROWS, x += ROWS * call->stride, t.out += ROWS * p->n) {
                fetch(&next, fetches);
                tile(ROWS, x, call->stride, turned, depth, &t);
            }
            if (m < m1) last_tile(m1 - m, x, call->stride, turned, depth, &t);
        }
    }
}

void hf_paged_gemm(const product *call) {
    const part *parts = call->parts;
    int64_t num_parts = call->num_parts, num_threads = call->num_threads, m = call->m;
    int64_t groups = 0, num_chunks = (m + MOST_ROWS - 1) / MOST_ROWS;
    int64_t chunk = ((m + num_chunks - 1) / num_chunks + ROWS - 1) / ROWS * ROWS;
    for (int64_t i = 0; i < num_parts; i++) groups += (parts[i].n + COLUMNS - 1) / COLUMNS;
    /* each group with all chunks of rows before the next group: a share of that is taken chunk by chunk, so that no two
     * threads read much of W */
    int64_t taken = 0, all = groups * num_chunks;
#pragma omp parallel num_threads((int)num_threads)
    for (int64_t begin, end; take_share(&taken, all, 1, num_threads, &begin, &end);) {
        for (int64_t c = 0; c < num_chunks; c++) {
            int64_t m0 = c * chunk, m1 = m0 + chunk < m ? m0 + chunk : m;
            int64_t g0 = (begin - c + num_chunks - 1) / num_chunks, g1 = (end - c + num_chunks - 1) / num_chunks;
            for (int64_t i = 0, offset = 0; i < num_parts && m0 < m; i++) {
                int64_t own = (parts[i].n + COLUMNS - 1) / COLUMNS;
                int64_t first = g0 > offset ? g0 - offset : 0, stop = g1 - offset < own ? g1 - offset : own;
                if (first < stop) multiply(call, &parts[i], first, stop, m0, m1);
                offset += own;
            }
        }
    }
}
