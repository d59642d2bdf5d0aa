/* New tokens' K or V into their slots of the pool, as they are. */
#include <stdint.h>
#include <string.h>

enum { WORTH_SHARING = 1 << 16 }; /* bytes */

typedef struct {
  const char *from; /* [tokens, heads, head_bytes], strides in bytes */
  char *to;         /* [slots, heads, head_bytes], contiguous */
} Copied;

typedef struct {
  Copied keys, values;
  const int64_t *slots; /* [tokens] */
  int64_t tokens, heads;
  int64_t key_bytes, key_token_stride, key_head_stride;
  int64_t value_bytes, value_token_stride, value_head_stride;
  int64_t num_threads;
} Write;

static inline void copy(Copied c, int64_t token, int64_t slot, int64_t heads, int64_t bytes, int64_t token_stride,
                        int64_t head_stride) {
  const char *from = c.from + token * token_stride;
  char *to = c.to + slot * heads * bytes;
  if (head_stride == bytes)
    memcpy(to, from, (size_t)(heads * bytes));
  else
    for (int64_t head = 0; head < heads; head++) memcpy(to + head * bytes, from + head * head_stride, (size_t)bytes);
}

void hf_paged_write(const Write *w) {
  int threads = w->tokens * w->heads * (w->key_bytes + w->value_bytes) < WORTH_SHARING ? 1 : (int)w->num_threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t token = 0; token < w->tokens; token++) {
    int64_t slot = w->slots[token];
    copy(w->keys, token, slot, w->heads, w->key_bytes, w->key_token_stride, w->key_head_stride);
    copy(w->values, token, slot, w->heads, w->value_bytes, w->value_token_stride, w->value_head_stride);
  }
}
