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
