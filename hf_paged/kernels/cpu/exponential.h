/* Exponential functions that a compiler can vectorise. */
#ifndef HF_PAGED_EXPONENTIAL_H
#define HF_PAGED_EXPONENTIAL_H

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef union {
  float f;
  uint32_t u;
} Bits;

/* exp for x <= 88: within 2 units in the last place; 0 below -87.3, where results would be subnormal. NaN stays. */
INLINE float exponential(float x) {
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which its low bits then hold */
  float bounded = x < -87.33f ? -87.33f : x;
  Bits n = {.f = bounded * 1.44269504f + magic};
  float whole = n.f - magic;
  float r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Bits power = {.u = (n.u + 127u) << 23};
  float result = p * power.f;
  return x < -87.33f ? 0.0f : result;
}

INLINE float hyperbolic_tangent(float x) {
  Bits bits = {.f = x};
  uint32_t sign = bits.u & 0x80000000u;
  bits.u ^= sign;
  float size = bits.f > 9.1f ? 9.1f : bits.f; /* 1 from there on */
  float square = size * size;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  float small = p * square * size + size;
  float large = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
  Bits result = {.f = size < 0.625f ? small : large};
  result.u |= sign;
  return result.f;
}

#endif
