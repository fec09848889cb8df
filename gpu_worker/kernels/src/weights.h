// A matrix as it is stored: packed [columns / 16][depth][16], columns padded with zeros, so that a panel of 16 outputs is
// one stream through memory; and what becomes of a panel's sums.
#pragma once

#include "tile.h"

// The last two are dots.h's.
enum class Stored : int64_t { FLOAT32, BFLOAT16, INT8, BFLOAT16_PAIRS, INT8_QUADS };
enum Epilogue { STORE, ADD, SILU_TIMES };

constexpr int64_t SCALE_DEPTH = 64;

// Mirrored by gpu_worker/kernels/structs.py. scales: [columns / 16][depth / 64][16] of both kinds of int8,
// else null; bias may be null.
struct Linear {
  const void* panels;
  const float* scales;
  const float* bias;
  int64_t depth, columns;
  Stored stored;

  int64_t num_panels() const { return (columns + COLUMNS - 1) / COLUMNS; }
};

template <Stored S>
struct Of {
  static constexpr Stored value = S;
};

static inline float widen(uint16_t bfloat16) {
  const uint32_t bits = uint32_t{bfloat16} << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Weights come from memory, once: asked for early, since a tile of many rows looks less far ahead than memory is away.
constexpr int64_t LINE = 64, LINES_AHEAD = 64;

// Where a run of a panel asks from, some lines further on. Past a panel's end begins the next one. Of P panels that are
// read beside each other, what comes after them lies P - 1 panels further.
template <typename T, int P>
struct Asked {
  static constexpr int64_t ROWS_IN_LINE = 4 / sizeof(T), ROWS_AHEAD = LINES_AHEAD * ROWS_IN_LINE;
  const T* values = nullptr;

  Asked() = default;
  // run: the i-th of a panel's rows, and those after it.
  Asked(const T* run, int64_t i, int64_t depth) : values(run + ROWS_AHEAD * COLUMNS) {
    if (P > 1 && i + RUN + ROWS_AHEAD > depth) values += (P - 1) * depth * COLUMNS;
  }
  // Always inlined: the compiler takes a function that only prefetches for one without effect, and drops its calls.
  __attribute__((always_inline)) void ask(int64_t step) const {
    if (step % ROWS_IN_LINE == 0) __builtin_prefetch(values + step * COLUMNS, 0, 2);
  }
};

// what out[row][column] becomes: y, out + y, or silu(out) * y
template <Epilogue E>
static inline vec finish(vec out, vec y) {
  if constexpr (E == STORE) return y;
  if constexpr (E == ADD) return out + y;
  return out / (1.0f + exp(-out)) * y;
}

// A panel's sums, rows `stride` apart, its bias added (or null), go through the epilogue. `width` columns of the panel are
// real.
template <Epilogue E>
static inline void finish_panel(const float* sums, int64_t stride, int64_t rows, const float* bias, float* out,
                                int64_t out_stride, int64_t width) {
  alignas(64) float padded_bias[COLUMNS] = {}, edge[COLUMNS] = {};
  if (bias) memcpy(padded_bias, bias, width * sizeof(float));
  vec biases[VECS];
  for (int v = 0; v < VECS; ++v) biases[v] = load(padded_bias + v * LANES);
  const auto finish_row = [&](const float* row, float* to) {
    for (int v = 0; v < VECS; ++v)
      store(to + v * LANES, finish<E>(load(to + v * LANES), load(row + v * LANES) + biases[v]));
  };
  if (width == COLUMNS) {
    for (int64_t r = 0; r < rows; ++r) finish_row(sums + r * stride, out + r * out_stride);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    memcpy(edge, out + r * out_stride, width * sizeof(float));
    finish_row(sums + r * stride, edge);
    memcpy(out + r * out_stride, edge, width * sizeof(float));
  }
}
