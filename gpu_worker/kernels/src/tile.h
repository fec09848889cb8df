// The one inner product of all kernels: C[R rows][P × 16 columns] += A[R][depth] · B[depth][P × 16].
//
// Batch invariance (design §6): an element of C is a chain of multiply-adds over depth, in order, by itself. How many
// rows and panels share a tile, and how depth is cut into calls, changes no bit of it.
#pragma once

#include "vec.h"

constexpr int COLUMNS = 16;
constexpr int VECS = COLUMNS / LANES;
// Rows of a full tile. Accumulators must fit the registers beside a row of B: 32 with AVX-512, else 16.
constexpr int TILE_ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;

constexpr int64_t RUN = 64;  // rows of B that are looked at together

// 16 columns of B. run(i): up to RUN of its rows from row i on, i a multiple of RUN; of a run, at(step, v) is vector v of
// the row `step` further, and ahead(step) says that this row is about to be read.
struct Floats {
  const float* values;
  int64_t stride = COLUMNS;
  Floats run(int64_t i) const { return {values + i * stride, stride}; }
  void ahead(int64_t) const {}
  vec at(int64_t step, int v) const { return load(values + step * stride + v * LANES); }
};

// The same; with each row, one of what is wanted next is asked for, into the second cache.
struct AskingFloats {
  const float *values, *asked;
  int64_t stride = COLUMNS, asked_stride = COLUMNS;
  AskingFloats run(int64_t i) const { return {values + i * stride, asked + i * asked_stride, stride, asked_stride}; }
  __attribute__((always_inline)) void ahead(int64_t step) const { __builtin_prefetch(asked + step * asked_stride, 0, 2); }
  vec at(int64_t step, int v) const { return load(values + step * stride + v * LANES); }
};

template <int R, int P = 1>
struct Tile {
  vec sums[P][R][VECS];

  void clear() {
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) sums[p][r][v] = vec{};
  }

  void read(const float* c, int64_t c_stride) {
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) sums[p][r][v] = load(c + r * c_stride + p * COLUMNS + v * LANES);
  }

  void write(float* c, int64_t c_stride) const {
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) store(c + r * c_stride + p * COLUMNS + v * LANES, sums[p][r][v]);
  }

  void scale_rows(const float (&by)[COLUMNS]) {
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) sums[p][r][v] *= by[r];
  }

  // Always inlined: called, it would keep its sums in memory, and not be trusted to prefetch (weights.h).
  template <typename Source>
  __attribute__((always_inline)) void multiply(const float* __restrict a, int64_t a_stride, const Source (&b)[P],
                                               int64_t depth) {
    for (int64_t start = 0; start < depth; start += RUN) {
      decltype(b[0].run(0)) runs[P];
      for (int p = 0; p < P; ++p) runs[p] = b[p].run(start);
      const int64_t steps = depth - start < RUN ? depth - start : RUN;
      for (int64_t step = 0; step < steps; ++step, ++a) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          runs[p].ahead(step);
          vec row[VECS];
          for (int v = 0; v < VECS; ++v) row[v] = runs[p].at(step, v);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) sums[p][r][v] += a[r * a_stride] * row[v];
        }
      }
    }
  }
};

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls body(Count<n>), n of [1, MOST].
template <int MOST, typename Body>
static inline void with_count(int64_t n, Body body) {
  if constexpr (MOST > 1)
    if (n < MOST) return with_count<MOST - 1>(n, body);
  body(Count<MOST>{});
}

// Calls body(Count<R>, first row) for as few tiles as can be, as even as can be: a small one would leave the core idle.
// Of more rows than one tile, none has less than half a tile's.
template <int MOST = TILE_ROWS, typename Body>
static inline void for_tiles(int64_t rows, Body body) {
  int64_t tiles = (rows + MOST - 1) / MOST;
  for (int64_t first = 0, size; first < rows; first += size, --tiles) {
    size = (rows - first + tiles - 1) / tiles;
    with_count<MOST>(size, [&](auto count) __attribute__((always_inline)) { body(count, first); });
  }
}

// Panels that a tile of few rows takes at once: one chain of additions a row does not keep a core busy.
constexpr int panels_at_once(int rows) {
  constexpr int sums = LANES == 16 ? 16 : 4;
  return rows * 4 <= sums ? 4 : rows * 2 <= sums ? 2 : 1;
}

// Calls body(Count<P>, panel) for panels [begin, end), P at once and then one by one.
template <int P, typename Body>
static inline void for_panels(int64_t begin, int64_t end, Body body) {
  for (; end - begin >= P; begin += P) body(Count<P>{}, begin);
  if constexpr (P > 1)
    for (; begin < end; ++begin) body(Count<1>{}, begin);
}
