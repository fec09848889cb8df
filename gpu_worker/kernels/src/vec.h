// Vectors of floats in the compiler's own notation: this file, and all that includes it, is compiled once per
// instruction set (see kernels.cpp), and only the number of lanes changes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float vec_in_memory __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16)));
typedef float vec4_in_memory __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ivec4 __attribute__((vector_size(16)));

static inline vec load(const float* from) { return *reinterpret_cast<const vec_in_memory*>(from); }
static inline void store(float* to, vec value) { *reinterpret_cast<vec_in_memory*>(to) = value; }
static inline vec broadcast(float value) { return value - vec{}; }

// e^x to about 1 ulp, as in Cephes' expf: x = n ln 2 + r, a polynomial in r, times 2^n. Flushes to 1.2e-38, not to 0;
// NaN stays NaN.
static inline vec exp(vec x) {
  x = x < -87.33f ? broadcast(-87.33f) : x;
  x = x > 88.37f ? broadcast(88.37f) : x;
  const vec shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the low mantissa bits are now n
  const ivec n = reinterpret_cast<ivec>(shifted) - 0x4B400000;
  const vec whole = shifted - 12582912.0f;
  const vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * reinterpret_cast<vec>((n + 127) << 23);
}

static inline float exp(float x) { return exp(broadcast(x))[0]; }

static inline float sum(vec values) {
  float total = values[0];
  for (int lane = 1; lane < LANES; ++lane) total += values[lane];
  return total;
}
