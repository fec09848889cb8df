// Linear layers over weights packed [columns / 16][depth][16], columns padded with zeros: a panel of 16 outputs is one
// stream through memory. Threads share out the panels.
#pragma once

#include "tile.h"

enum Epilogue { STORE, ADD, SILU_TIMES };

constexpr int64_t SERIAL_BELOW = 1 << 15;  // multiply-adds: less is done before another thread wakes up

// what out[row][column] becomes: y, out + y, or silu(out) * y
template <Epilogue E>
static inline vec finish(vec out, vec y) {
  if constexpr (E == STORE) return y;
  if constexpr (E == ADD) return out + y;
  return out / (1.0f + exp(-out)) * y;
}

// One panel for all rows. `width` columns of it are real.
template <Epilogue E>
static void panel(const float* x, int64_t x_stride, const float* weights, const float* bias, float* out,
                  int64_t out_stride, int64_t rows, int64_t depth, int64_t width) {
  float padded_bias[COLUMNS] = {};
  if (bias) memcpy(padded_bias, bias, width * sizeof(float));
  for_tiles(rows, [&](auto tile_rows, int64_t first) __attribute__((always_inline)) {
    constexpr int R = decltype(tile_rows)::count;
    Tile<R> tile;
    tile.clear();
    tile.multiply(x + first * x_stride, x_stride, weights, COLUMNS, depth);
    for (int r = 0; r < R; ++r) {
      float* to = out + (first + r) * out_stride;
      float edge[COLUMNS] = {};
      float* target = to;
      if (width < COLUMNS) {
        memcpy(edge, to, width * sizeof(float));
        target = edge;
      }
      for (int v = 0; v < VECS; ++v) {
        const vec y = tile.sums[r][v] + load(padded_bias + v * LANES);
        store(target + v * LANES, finish<E>(load(target + v * LANES), y));
      }
      if (width < COLUMNS) memcpy(to, edge, width * sizeof(float));
    }
  });
}

template <typename Body>
static inline void for_panels(int64_t columns, int64_t work, int threads, Body body) {
  const int64_t panels = (columns + COLUMNS - 1) / COLUMNS;
  const int64_t chunk = panels / (threads * 8) + 1;  // small enough that a thread held up by others is helped out
#pragma omp parallel for num_threads(work < SERIAL_BELOW ? 1 : threads) schedule(dynamic, chunk)
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t left = columns - p * COLUMNS;
    body(p, left < COLUMNS ? left : int64_t{COLUMNS});
  }
}

// x [rows, depth] → out [rows, columns] = x Wᵀ + bias, or with `add` out += that. bias may be null.
extern "C" void KERNEL(linear)(const float* x, int64_t x_stride, const float* weights, const float* bias, float* out,
                               int64_t out_stride, int64_t rows, int64_t depth, int64_t columns, int64_t add,
                               int64_t threads) {
  for_panels(columns, rows * depth * columns, threads, [&](int64_t p, int64_t width) {
    const float* panel_weights = weights + p * depth * COLUMNS;
    const float* panel_bias = bias ? bias + p * COLUMNS : nullptr;
    float* to = out + p * COLUMNS;
    if (add)
      panel<ADD>(x, x_stride, panel_weights, panel_bias, to, out_stride, rows, depth, width);
    else
      panel<STORE>(x, x_stride, panel_weights, panel_bias, to, out_stride, rows, depth, width);
  });
}

// x [rows, depth] → out [rows, columns] = silu(x Gᵀ + gate_bias) * (x Uᵀ + up_bias): SwiGLU's first half.
extern "C" void KERNEL(swiglu)(const float* x, int64_t x_stride, const float* gate, const float* gate_bias,
                               const float* up, const float* up_bias, float* out, int64_t out_stride, int64_t rows,
                               int64_t depth, int64_t columns, int64_t threads) {
  for_panels(columns, 2 * rows * depth * columns, threads, [&](int64_t p, int64_t width) {
    const int64_t at = p * depth * COLUMNS;
    float* to = out + p * COLUMNS;
    panel<STORE>(x, x_stride, gate + at, gate_bias ? gate_bias + p * COLUMNS : nullptr, to, out_stride, rows, depth,
                 width);
    panel<SILU_TIMES>(x, x_stride, up + at, up_bias ? up_bias + p * COLUMNS : nullptr, to, out_stride, rows, depth,
                      width);
  });
}
