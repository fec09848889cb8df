// Softmax weights of rows of scores, online (https://arxiv.org/abs/2205.14135), in powers of two: e^s = 2^(s * log2 e).
#pragma once

#include "tile.h"

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float HIDDEN = -__builtin_inff();  // the score of a key that a row does not see: its weight is 0
constexpr float NOTHING_YET = -1e30f;        // maximum of a row that has seen no key

// 2^x for x ≤ 0 to about 1 ulp; 0 where that is below 2^-126. x = n + r: a polynomial in r, n added to its exponent.
static inline vec exp2(vec x) {
  x = larger(broadcast(-127.0f), x);
  const vec shifted = x + 12582912.0f;  // 1.5 * 2^23: the low mantissa bits are now n
  const vec r = x - (shifted - 12582912.0f);
  vec p = 1.5353383787e-4f * r + 1.3399039162e-3f;
  p = p * r + 9.6184378490e-3f;
  p = p * r + 5.5503319949e-2f;
  p = p * r + 2.4022647738e-1f;
  p = p * r + 6.9314718246e-1f;
  p = p * r + 1.0f;
  return reinterpret_cast<vec>(reinterpret_cast<ivec>(p) + (reinterpret_cast<ivec>(shifted) << 23));
}

// Scores of R rows [R][stride] become weights, columns [begin, end), multiples of 16. A row's state, in `states`, [R] and
// state_stride apart: LANES sums of weights, then, COLUMNS on, the maximum that they are relative to, as an exponent of two.
// Returns in shrink by how much what a row had so far shrinks.
template <int R>
static inline void weigh(float* scores, int64_t stride, int64_t begin, int64_t end, float* states, int64_t state_stride,
                         float (&shrink)[COLUMNS]) {
  alignas(64) float before[COLUMNS] = {}, maxima[COLUMNS] = {};
  for (int r = 0; r < R; ++r) {
    vec highest_scores = broadcast(HIDDEN);
    for (int64_t i = begin; i < end; i += LANES) highest_scores = larger(load(scores + r * stride + i), highest_scores);
    const float score = highest(highest_scores) * LOG2_E;
    before[r] = states[r * state_stride + COLUMNS];
    maxima[r] = score > before[r] ? score : before[r];
  }
  for (int v = 0; v < VECS; ++v) store(shrink + v * LANES, exp2(load(before + v * LANES) - load(maxima + v * LANES)));
  for (int r = 0; r < R; ++r) {
    float* state = states + r * state_stride;
    vec sums = load(state) * shrink[r];
    for (int64_t i = begin; i < end; i += LANES) {
      float* at = scores + r * stride + i;
      const vec weights = exp2(load(at) * LOG2_E - maxima[r]);
      store(at, weights);
      sums += weights;
    }
    store(state, sums);
    state[COLUMNS] = maxima[r];
  }
}
