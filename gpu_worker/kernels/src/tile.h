// The one inner product of all kernels: C[R rows][16 columns] += A[R][depth] · B[depth][16].
//
// Batch invariance (design §6): an element of C is a chain of multiply-adds over depth, in order, by itself. How many
// rows share a tile, and how depth is cut into calls, changes no bit of it.
#pragma once

#include "vec.h"

constexpr int COLUMNS = 16;
constexpr int VECS = COLUMNS / LANES;
// Rows of a full tile. Accumulators must fit the registers beside a row of B: 32 with AVX-512, else 16.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 4;

template <int R>
struct Tile {
  vec sums[R][VECS];

  void clear() {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECS; ++v) sums[r][v] = vec{};
  }

  void read(const float* c, int64_t c_stride) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECS; ++v) sums[r][v] = load(c + r * c_stride + v * LANES);
  }

  void write(float* c, int64_t c_stride) const {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECS; ++v) store(c + r * c_stride + v * LANES, sums[r][v]);
  }

  void multiply(const float* __restrict a, int64_t a_stride, const float* __restrict b, int64_t b_stride,
                int64_t depth) {
    for (int64_t i = 0; i < depth; ++i) {
      vec row[VECS];
      for (int v = 0; v < VECS; ++v) row[v] = load(b + i * b_stride + v * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) sums[r][v] += a[r * a_stride + i] * row[v];
    }
  }
};

template <int R>
struct Rows {
  static constexpr int count = R;
};

// Calls body(Rows<R>, first row) for full tiles, then for what is left.
template <int R = TILE_ROWS, typename Body>
static inline void for_tiles(int64_t rows, Body body, int64_t first = 0) {
  for (; rows - first >= R; first += R) body(Rows<R>{}, first);
  if constexpr (R > 1)
    if (first < rows) for_tiles<R - 1>(rows, body, first);
}
