/* y = x W^T + b for few rows, on weights as they lie in memory.
 *
 *            k ->                     k ->                     n ->
 *   x  m | . . . . . .      W   n | . . . . . .      y   m | . . . .
 *        v                        v                        v
 *
 * A thread takes groups of six rows of W. It keeps one group in the first cache and takes all rows of x past it, ROWS at
 * a time: ROWS * COLUMNS sums stay in registers, each a vector along k. So W is read from memory once. The next group is
 * fetched while this one is used, a few lines at a time over all passes: a core keeps only some twenty in flight, and one
 * that asks for more waits instead of multiplying. The order of a sum depends on k alone: a row's result doesn't depend
 * on the rows beside it, on n, or on the number of threads.
 */
#include <stddef.h>
#include <string.h>

#include "product.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* ROWS * COLUMNS sums, a vector of each of ROWS rows of x, and one of W have to fit the registers. */
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 4
#elif defined(__AVX__)
#define LANES 8
#define ROWS 2
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 4
#else
#define LANES 4
#define ROWS 2
#endif
#define COLUMNS 6
#define DEPTH 768            /* values of a row of W that are used at a time: a group of them fits the first cache */
#define MOST_ROWS 64         /* of x that are taken past a group of W: DEPTH values of each fit the second cache */
#define PANEL 8              /* groups that are taken before the next values of their rows */
#define BAD_STRIDE 1024      /* rows that lie a multiple of this apart share their places in a cache, */
#define FEW_ROWS 8           /* so W is copied if there are more rows of x than make up for it */
#define LINE 64              /* bytes of a cache line */
#define MOST_FETCHES 12      /* lines of W that are asked for in two steps of a pass */

/* Makes a compiler hold a value in a register: left to itself it loads x once for each use, and loads are the limit. */
#if defined(__AVX__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define KEEP(v) __asm__("" : "+w"(v))
#else
#define KEEP(v)
#endif

typedef float lanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float sums __attribute__((vector_size(LANES * 4)));

/* The sums of six vectors, each in the same order. */
static inline void add_up(const sums *s, float *total) {
#if defined(__AVX__)
    __m256 h[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) {
#if defined(__AVX512F__)
        __m512d v = _mm512_castps_pd((__m512)s[j]);
        h[j] = _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(v)), _mm256_castpd_ps(_mm512_extractf64x4_pd(v, 1)));
#else
        h[j] = (__m256)s[j];
#endif
    }
    __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
    __m256 pair = _mm256_hadd_ps(h[4], h[5]), two = _mm256_hadd_ps(pair, pair);
    _mm_storeu_ps(total, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
    _mm_storel_pi((__m64 *)(total + 4), _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#else
    for (int j = 0; j < COLUMNS; j++) total[j] = (s[j][0] + s[j][2]) + (s[j][1] + s[j][3]);
#endif
}

/* Where the lines lie that are needed next of W, from its first byte on. The last is repeated, so that a pass may fetch
 * past the end. */
typedef struct {
    int32_t at[COLUMNS * (DEPTH * 4 / LINE + 1) + MOST_FETCHES * (DEPTH / LANES)];
    int64_t count, depth;
} lines;

/* A group of rows of W, a part of their length at a time, and where the products go. */
typedef struct {
    const float *w[COLUMNS];
    const char *ahead; /* what is needed next of W */
    int64_t depth;
    int is_first, is_last; /* of the parts */
    const float *bias;     /* or NULL */
    float *out;
    int64_t out_stride;
    int count; /* columns that there are */
} strip;

static void find_lines(lines *l, int64_t k, int64_t depth, int64_t size) {
    if (l->depth == depth) return;
    l->depth = depth;
    l->count = 0;
    for (int j = 0; j < COLUMNS; j++)
        for (int64_t byte = 0; byte < depth * size; byte += LINE) l->at[l->count++] = (int32_t)(j * k * size + byte);
    for (size_t i = (size_t)l->count; i < sizeof l->at / sizeof *l->at; i++) l->at[i] = l->at[l->count - 1];
}

/* `rows` and `fetches`, lines in two steps, are constants where this is inlined. */
static inline __attribute__((always_inline)) void multiply(const strip *t, int rows, int fetches, const int32_t *line,
                                                           const float *x, int64_t stride, sums (*carried)[COLUMNS],
                                                           int64_t row) {
    sums s[ROWS][COLUMNS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < COLUMNS; j++) s[i][j] = t->is_first ? (sums){0} : carried[i][j];
    const float *w0 = t->w[0], *w1 = t->w[1], *w2 = t->w[2], *w3 = t->w[3], *w4 = t->w[4], *w5 = t->w[5];
    const char *ahead = t->ahead;
    int64_t p = 0;
#define COLUMN(J)                                  \
    {                                              \
        sums v = *(const lanes *)(w##J + p);       \
        KEEP(v);                                   \
        for (int i = 0; i < rows; i++) s[i][J] += a[i] * v; \
    }
#define STEP                                       \
    {                                              \
        sums a[ROWS];                              \
        for (int i = 0; i < rows; i++) {           \
            a[i] = *(const lanes *)(x + i * stride + p); \
            KEEP(a[i]);                            \
        }                                          \
        COLUMN(0) COLUMN(1) COLUMN(2) COLUMN(3) COLUMN(4) COLUMN(5) \
        p += LANES;                                \
    }
    while (p + 2 * LANES <= t->depth) {
        for (int f = 0; f < fetches; f++) __builtin_prefetch(ahead + line[f]);
        line += fetches;
        STEP STEP
    }
    if (p + LANES <= t->depth) STEP
#undef STEP
#undef COLUMN
    if (p < t->depth) {
        size_t rest = (size_t)(t->depth - p) * sizeof(float);
        for (int i = 0; i < rows; i++) {
            sums a = {0};
            memcpy(&a, x + i * stride + p, rest);
            for (int j = 0; j < COLUMNS; j++) {
                sums v = {0};
                memcpy(&v, t->w[j] + p, rest);
                s[i][j] += a * v;
            }
        }
    }
    for (int i = 0; i < rows; i++) {
        if (!t->is_last) {
            for (int j = 0; j < COLUMNS; j++) carried[i][j] = s[i][j];
            continue;
        }
        float total[COLUMNS], *out = t->out + (row + i) * t->out_stride;
        if (t->count == COLUMNS) {
            add_up(s[i], out);
        } else {
            add_up(s[i], total);
            memcpy(out, total, (size_t)t->count * sizeof(float));
        }
        if (t->bias)
            for (int j = 0; j < t->count; j++) out[j] += t->bias[j];
    }
}

static void multiply_some(const strip *t, int64_t rows, int fetches, const int32_t *line, const float *x, int64_t stride,
                          sums (*carried)[COLUMNS], int64_t row) {
#define ONE(R, F) multiply(t, R, F, line, x, stride, carried, row)
#define CASE(R)                           \
    case R:                               \
        if (fetches == 0) ONE(R, 0);      \
        else if (fetches == 1) ONE(R, 1); \
        else if (fetches == 2) ONE(R, 2); \
        else if (fetches == 3) ONE(R, 3); \
        else if (fetches <= 6) ONE(R, 6); \
        else ONE(R, MOST_FETCHES);        \
        break;
    switch (rows) {
        CASE(1)
        CASE(2)
#if ROWS == 4
        CASE(3)
        CASE(4)
#endif
    }
#undef CASE
#undef ONE
}

/* Up to PANEL groups of W, from row `first`, times rows `m0` to `m0 + rows` of x. Long rows are taken a part of their
 * length at a time, all groups before the next part: so what is used of x and W stays near, however long they are. */
static void panel(const part *p, int64_t first, int64_t groups, const float *x, int64_t stride, int64_t m0, int64_t rows,
                  int64_t k, int is_bf16, lines *next) {
    sums carried[PANEL][MOST_ROWS][COLUMNS]; /* used by long rows only */
    float wide[COLUMNS][DEPTH];
    int64_t size = is_bf16 ? 2 : 4;
    int copies = k % BAD_STRIDE == 0 && rows > FEW_ROWS;
    int64_t passes = (rows + ROWS - 1) / ROWS;
    strip t = {.out_stride = p->n};
    for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
        t.depth = k - k0 < DEPTH ? k - k0 : DEPTH;
        t.is_first = k0 == 0;
        t.is_last = k0 + t.depth == k;
        find_lines(next, k, t.depth, size);
        int64_t pairs = t.depth / (2 * LANES), fetches = pairs ? (next->count + passes * pairs - 1) / (passes * pairs) : 0;
        if (fetches > 3) fetches = fetches > 6 ? MOST_FETCHES : 6;
        for (int64_t g = 0; g < groups; g++) {
            int64_t column = first + g * COLUMNS;
            t.count = (int)(p->n - column < COLUMNS ? p->n - column : COLUMNS);
            t.bias = p->bias ? p->bias + column : NULL;
            t.out = p->out + column;
            for (int j = 0; j < COLUMNS; j++) { /* past the last row: the last one again, and its sums are left */
                int64_t row = column + (j < t.count ? j : t.count - 1);
                const char *at = (const char *)p->weight + (row * k + k0) * size;
                if (is_bf16) {
                    widen((const uint16_t *)at, wide[j], t.depth);
                    t.w[j] = wide[j];
                } else if (copies) {
                    memcpy(wide[j], at, (size_t)t.depth * sizeof(float));
                    t.w[j] = wide[j];
                } else {
                    t.w[j] = (const float *)at;
                }
            }
            int64_t row = g + 1 < groups || t.is_last ? column + COLUMNS : first;
            int64_t from = g + 1 < groups ? k0 : t.is_last ? 0 : k0 + DEPTH;
            t.ahead = (const char *)p->weight + (row * k + from) * size;
            const int32_t *line = next->at, *end = next->at + next->count;
            for (int64_t i = 0; i < rows; i += ROWS, line += fetches * pairs) {
                int64_t some = rows - i < ROWS ? rows - i : ROWS;
                multiply_some(&t, some, line < end ? (int)fetches : 0, line, x + (m0 + i) * stride + k0, stride,
                              carried[g] + i, m0 + i);
            }
        }
    }
}

void hf_paged_linear(const product *call) {
    const part *parts = call->parts;
    int64_t m = call->m, num_parts = call->num_parts, num_threads = call->num_threads;
    int64_t groups = 0;
    for (int64_t i = 0; i < num_parts; i++) groups += (parts[i].n + COLUMNS - 1) / COLUMNS;
    int64_t taken = 0;
#pragma omp parallel num_threads((int)num_threads)
    {
        lines next = {.depth = -1};
        for (int64_t begin, end; take_share(&taken, groups, PANEL, num_threads, &begin, &end);)
            for (int64_t m0 = 0; m0 < m; m0 += MOST_ROWS) {
                int64_t rows = m - m0 < MOST_ROWS ? m - m0 : MOST_ROWS, offset = 0;
                for (int64_t i = 0; i < num_parts; i++) {
                    int64_t own = (parts[i].n + COLUMNS - 1) / COLUMNS;
                    int64_t g = begin > offset ? begin - offset : 0, stop = end - offset < own ? end - offset : own;
                    for (; g < stop; g += PANEL)
                        panel(&parts[i], g * COLUMNS, stop - g < PANEL ? stop - g : PANEL, call->x, call->stride, m0, rows,
                              call->k, (int)call->is_bf16, &next);
                    offset += own;
                }
            }
    }
}
