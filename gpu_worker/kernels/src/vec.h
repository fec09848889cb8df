// Vectors of floats in the compiler's own notation: this file, and all that includes it, is compiled once per
// instruction set (see kernels.cpp), and only the number of lanes changes.
#pragma once

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
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef uint16_t halves_in_memory __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t bytes_in_memory __attribute__((vector_size(LANES), aligned(1), may_alias));

static inline vec load(const float* from) { return *reinterpret_cast<const vec_in_memory*>(from); }
static inline void store(float* to, vec value) { *reinterpret_cast<vec_in_memory*>(to) = value; }
// To 32 bits a lane. The compiler has no one instruction for its own notation here, so the wide sets are told theirs.
#if defined(__AVX512F__)
static inline ivec widen(halves values) { return reinterpret_cast<ivec>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(values))); }
static inline ivec widen(bytes values) { return reinterpret_cast<ivec>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(values))); }
#elif defined(__AVX2__)
static inline ivec widen(halves values) { return reinterpret_cast<ivec>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(values))); }
static inline ivec widen(bytes values) { return reinterpret_cast<ivec>(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, reinterpret_cast<int64_t>(values)))); }
#else
static inline ivec widen(halves values) { return __builtin_convertvector(values, ivec); }
static inline ivec widen(bytes values) { return __builtin_convertvector(values, ivec); }
#endif
static inline vec larger(vec a, vec b) { return a > b ? a : b; }
static inline vec broadcast(float value) { return value - vec{}; }

// A bfloat16 is the upper half of a float.
static inline vec load(const uint16_t* from) {
  return reinterpret_cast<vec>(widen(*reinterpret_cast<const halves_in_memory*>(from)) << 16);
}
static inline vec load(const int8_t* from) {
  return __builtin_convertvector(widen(*reinterpret_cast<const bytes_in_memory*>(from)), vec);
}

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

// Lane i becomes lane i + SHIFT.
template <int SHIFT>
static inline vec rotated(vec values) {
  ivec index;
  for (int lane = 0; lane < LANES; ++lane) index[lane] = (lane + SHIFT) % LANES;
  return __builtin_shuffle(values, index);
}

template <int SHIFT = LANES / 2>
static inline float sum(vec values) {
  values += rotated<SHIFT>(values);
  if constexpr (SHIFT > 1) return sum<SHIFT / 2>(values);
  return values[0];
}

template <int SHIFT = LANES / 2>
static inline float highest(vec values) {
  const vec others = rotated<SHIFT>(values);
  values = others > values ? others : values;
  if constexpr (SHIFT > 1) return highest<SHIFT / 2>(values);
  return values[0];
}
