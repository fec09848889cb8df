// RMSNorm, and what stands between the q, k and v of a layer and its KV pages.
#pragma once

#include "team.h"

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

// By a whole team: x, out [rows, size], both contiguous.
static inline void rms_norm(Team& team, const float* x, const float* weight, float* out, int64_t rows, int64_t size,
                            float eps) {
  team.share(rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) normalize(x + row * size, weight, out + row * size, size, eps);
  });
}

// head [2 * half]: dims i and i + half are a pair; https://arxiv.org/abs/2104.09864
static inline void rotate(const float* head, const float* cos, const float* sin, float* to, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[half + i];
    to[i] = first * cos[i] - second * sin[i];
    to[half + i] = second * cos[i] + first * sin[i];
  }
}

// Of every layer alike.
struct HeadShape {
  int64_t heads, kv_heads, head_dim;
  int64_t row_size() const { return (heads + 2 * kv_heads) * head_dim; }
};

// By a whole team. qkv: [rows, heads + 2 * kv_heads, head_dim], contiguous: q is normed and rotated in place; k, so
// treated, and v go to slots[row] of keys and values [slots, kv_heads, head_dim]. cos, sin: [positions, head_dim / 2].
// Norm weights [head_dim] may be null.
static inline void rope_and_write(Team& team, float* qkv, const float* q_norm, const float* k_norm, float eps,
                                  const float* cos, const float* sin, const int64_t* positions, const int64_t* slots,
                                  float* keys, float* values, int64_t rows, HeadShape shape) {
  const int64_t dim = shape.head_dim, half = dim / 2;
  team.share(rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* q = qkv + row * shape.row_size();
      float* k = q + shape.heads * dim;
      const float* row_cos = cos + positions[row] * half;
      const float* row_sin = sin + positions[row] * half;
      for (int64_t h = 0; h < shape.heads; ++h, q += dim) {
        if (q_norm) normalize(q, q_norm, q, dim, eps);
        rotate(q, row_cos, row_sin, q, half);
      }
      const int64_t slot = slots[row] * shape.kv_heads * dim;
      for (int64_t h = 0; h < shape.kv_heads; ++h) {
        float* head = k + h * dim;
        if (k_norm) normalize(head, k_norm, head, dim, eps);
        rotate(head, row_cos, row_sin, keys + slot + h * dim, half);
      }
      memcpy(values + slot, k + shape.kv_heads * dim, shape.kv_heads * dim * sizeof(float));
    }
  });
}
