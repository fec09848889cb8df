// RMSNorm, and what stands between the q, k and v of a layer and its KV pages.
#pragma once

#include "vec.h"

// to[i] = weight[i] * from[i] / rms(from); https://arxiv.org/abs/1910.07467. May be in place.
static inline void normalize(const float* from, const float* weight, float* to, int64_t size, float eps) {
  vec squares{};
  float rest = 0.0f;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares += load(from + i) * load(from + i);
  for (; i < size; ++i) rest += from[i] * from[i];
  const float scale = 1.0f / __builtin_sqrtf((sum(squares) + rest) / size + eps);
  for (i = 0; i + LANES <= size; i += LANES) store(to + i, load(weight + i) * (load(from + i) * scale));
  for (; i < size; ++i) to[i] = weight[i] * (from[i] * scale);
}

// x, out: [rows, size], both contiguous
extern "C" void KERNEL(rms_norm)(const float* x, const float* weight, float* out, int64_t rows, int64_t size,
                                 float eps, int64_t threads) {
#pragma omp parallel for num_threads(rows < 16 ? 1 : threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) normalize(x + row * size, weight, out + row * size, size, eps);
}

// head [2 * half]: dims i and i + half are a pair; https://arxiv.org/abs/2104.09864
static inline void rotate(const float* head, const float* cos, const float* sin, float* to, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[half + i];
    to[i] = first * cos[i] - second * sin[i];
    to[half + i] = second * cos[i] + first * sin[i];
  }
}

// qkv: [rows, heads + 2 * kv_heads, head_dim], contiguous: q is normed and rotated in place; k, so treated, and v go to
// slots[row] of keys and values [slots, kv_heads, head_dim]. cos, sin: [rows, head_dim / 2]. Norm weights
// [head_dim] may be null.
extern "C" void KERNEL(rope_and_write)(float* qkv, const float* q_norm, const float* k_norm, float eps,
                                       const float* cos, const float* sin, const int64_t* slots, float* keys,
                                       float* values, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                       int64_t threads) {
  const int64_t half = head_dim / 2;
#pragma omp parallel for num_threads(rows < 16 ? 1 : threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    float* q = qkv + row * (heads + 2 * kv_heads) * head_dim;
    float* k = q + heads * head_dim;
    const float* row_cos = cos + row * half;
    const float* row_sin = sin + row * half;
    for (int64_t h = 0; h < heads; ++h, q += head_dim) {
      if (q_norm) normalize(q, q_norm, q, head_dim, eps);
      rotate(q, row_cos, row_sin, q, half);
    }
    const int64_t slot = slots[row] * kv_heads * head_dim;
    for (int64_t h = 0; h < kv_heads; ++h) {
      float* head = k + h * head_dim;
      if (k_norm) normalize(head, k_norm, head, head_dim, eps);
      rotate(head, row_cos, row_sin, keys + slot + h * head_dim, half);
    }
    memcpy(values + slot, k + kv_heads * head_dim, kv_heads * head_dim * sizeof(float));
  }
}
