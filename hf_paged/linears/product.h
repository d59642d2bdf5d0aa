/* What linear.c and gemm.c are asked for: x `[m, k]` float32, rows `stride` apart, times each of the parts. */
#include <stdint.h>
#include <string.h>

/* One weight `[n, k]`, rows `k` apart, and where its product goes: `[m, n]` float32. */
typedef struct {
    const void *weight;
    const float *bias; /* or NULL */
    float *out;
    int64_t n;
} part;

typedef struct {
    const float *x;
    const part *parts;
    int64_t m, k, stride, num_parts;
    int64_t is_bf16; /* the weights; float32 otherwise */
    int64_t num_threads;
} product;

/* bfloat16 to float32. */
static inline void widen(const uint16_t *from, float *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

/* A thread's next share of `all` pieces of work: a part of what is left, so that early ones are long and those at the end
 * short. Threads that get less of their cores than others take less, and all end together. Returns 0 if nothing is left;
 * *begin and *end are where the share lies. */
static inline int take_share(int64_t *taken, int64_t all, int64_t least, int64_t num_threads, int64_t *begin, int64_t *end) {
    int64_t first = __atomic_load_n(taken, __ATOMIC_RELAXED), size;
    do {
        if (first >= all) return 0;
        size = (all - first) / (2 * num_threads) / least * least;
        if (size < least) size = least;
        if (size > all - first || num_threads == 1) size = all - first;
    } while (!__atomic_compare_exchange_n(taken, &first, first + size, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    *begin = first;
    *end = first + size;
    return 1;
}
