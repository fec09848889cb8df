// Tokens to columns: lane t of column d is dimension d of token t.
#pragma once

#include "tile.h"

// Four floats of each of LANES / 4 tokens, `stride` apart.
#if defined(__AVX512F__)
static inline vec load_fours(const float* from, int64_t stride) {
  __m512 fours = _mm512_castps128_ps512(_mm_loadu_ps(from));
  fours = _mm512_insertf32x4(fours, _mm_loadu_ps(from + stride), 1);
  fours = _mm512_insertf32x4(fours, _mm_loadu_ps(from + 2 * stride), 2);
  return reinterpret_cast<vec>(_mm512_insertf32x4(fours, _mm_loadu_ps(from + 3 * stride), 3));
}
#elif defined(__AVX__)
static inline vec load_fours(const float* from, int64_t stride) {
  const __m256 fours = _mm256_castps128_ps256(_mm_loadu_ps(from));
  return reinterpret_cast<vec>(_mm256_insertf128_ps(fours, _mm_loadu_ps(from + stride), 1));
}
#else
static inline vec load_fours(const float* from, int64_t) { return load(from); }
#endif

// Of every four lanes alike: lanes [i, j] of a, then [k, l] of b.
template <int I, int J, int K, int L>
static inline vec pick(vec a, vec b) {
  ivec index;
  for (int lane = 0; lane < LANES; lane += 4) {
    index[lane] = lane + I;
    index[lane + 1] = lane + J;
    index[lane + 2] = lane + K;
    index[lane + 3] = lane + L;
  }
  return __builtin_shuffle(a, b, index);
}

// Four dimensions of LANES tokens [LANES][stride].
static inline void load_columns(const float* tokens, int64_t stride, vec (&columns)[4]) {
  vec rows[4];  // i: of tokens i, i + 4, …
  for (int i = 0; i < 4; ++i) rows[i] = load_fours(tokens + i * stride, 4 * stride);
  const vec low01 = pick<0, LANES, 1, LANES + 1>(rows[0], rows[1]);
  const vec high01 = pick<2, LANES + 2, 3, LANES + 3>(rows[0], rows[1]);
  const vec low23 = pick<0, LANES, 1, LANES + 1>(rows[2], rows[3]);
  const vec high23 = pick<2, LANES + 2, 3, LANES + 3>(rows[2], rows[3]);
  columns[0] = pick<0, 1, LANES, LANES + 1>(low01, low23);
  columns[1] = pick<2, 3, LANES + 2, LANES + 3>(low01, low23);
  columns[2] = pick<0, 1, LANES, LANES + 1>(high01, high23);
  columns[3] = pick<2, 3, LANES + 2, LANES + 3>(high01, high23);
}

// tokens [16][stride] → columns [head_dim][16]
static inline void transpose(const float* tokens, int64_t stride, int64_t head_dim, float* columns) {
  for (int64_t t = 0; t < COLUMNS; t += LANES)
    for (int64_t d = 0; d < head_dim; d += 4) {
      vec four[4];
      load_columns(tokens + t * stride + d, stride, four);
      for (int i = 0; i < 4; ++i) store(columns + (d + i) * COLUMNS + t, four[i]);
    }
}
