// Linear layers over packed weights (weights.h). Threads share out the panels.
//
// Weights are stored as float32, bfloat16 or int8 with a scale for every 64 of depth; the arithmetic is float32, with
// the same bits whether a weight is widened on its way into a tile or beforehand. Those stored for dot products have
// arithmetic of their own (dots.h).
#pragma once

#include "dots.h"
#include "team.h"
#include "tile.h"
#include "weights.h"

template <typename T, int P>
struct WeightsRun {
  const T* values;
  Asked<T, P> asked;
  __attribute__((always_inline)) void ahead(int64_t step) const { asked.ask(step); }
  vec at(int64_t step, int v) const { return load(values + step * COLUMNS + v * LANES); }
};

template <typename T, int P>
struct Weights {
  const T* values;
  int64_t depth;
  WeightsRun<T, P> run(int64_t i) const { return {values + i * COLUMNS, {values + i * COLUMNS, i, depth}}; }
};

template <int P>
struct ScaledRun {
  const int8_t* values;
  Asked<int8_t, P> asked;
  vec scales[VECS];
  __attribute__((always_inline)) void ahead(int64_t step) const { asked.ask(step); }
  vec at(int64_t step, int v) const { return load(values + step * COLUMNS + v * LANES) * scales[v]; }
};

template <int P>
struct ScaledWeights {
  const int8_t* values;
  const float* scales;  // [depth / 64][16]
  int64_t depth;
  ScaledRun<P> run(int64_t i) const {
    static_assert(RUN == SCALE_DEPTH);
    ScaledRun<P> run{values + i * COLUMNS, {values + i * COLUMNS, i, depth}, {}};
    for (int v = 0; v < VECS; ++v) run.scales[v] = load(scales + i / SCALE_DEPTH * COLUMNS + v * LANES);
    return run;
  }
};

// Leaves what it reads in float32 for whoever comes next.
template <typename Source>
struct Kept {
  Source source;
  float* floats;
  auto run(int64_t i) const { return Kept<decltype(source.run(i))>{source.run(i), floats + i * COLUMNS}; }
  __attribute__((always_inline)) void ahead(int64_t step) const { source.ahead(step); }
  vec at(int64_t step, int v) const {
    const vec value = source.at(step, v);
    store(floats + step * COLUMNS + v * LANES, value);
    return value;
  }
};

// A panel from row `start` on, a multiple of RUN; one of P that are read beside each other, from their first rows on.
template <Stored S, int P = 1>
static inline auto source(const Linear& w, int64_t panel, int64_t start = 0) {
  const int64_t at = (panel * w.depth + start) * COLUMNS;
  if constexpr (S == Stored::FLOAT32) return Weights<float, P>{static_cast<const float*>(w.panels) + at, w.depth};
  if constexpr (S == Stored::BFLOAT16) return Weights<uint16_t, P>{static_cast<const uint16_t*>(w.panels) + at, w.depth};
  if constexpr (S == Stored::INT8) {
    const int64_t groups = (w.depth + SCALE_DEPTH - 1) / SCALE_DEPTH;
    return ScaledWeights<P>{static_cast<const int8_t*>(w.panels) + at,
                            w.scales + (panel * groups + start / SCALE_DEPTH) * COLUMNS, w.depth};
  }
}

// P panels from `panel` on for R rows. Not inlined: beside other tiles there are too few registers for the addresses of
// rows.
template <Epilogue E, int R, int P, typename Source>
__attribute__((noinline)) static void multiply_panels(const float* x, int64_t x_stride, const Linear& w,
                                                      const Source (&sources)[P], int64_t panel, float* out,
                                                      int64_t out_stride) {
  Tile<R, P> tile;
  tile.clear();
  tile.multiply(x, x_stride, sources, w.depth);
  float sums[R * P * COLUMNS];
  tile.write(sums, P * COLUMNS);
  for (int p = 0; p < P; ++p) {
    const int64_t column = (panel + p) * COLUMNS, left = w.columns - column;
    finish_panel<E>(sums + p * COLUMNS, P * COLUMNS, R, w.bias ? w.bias + column : nullptr, out + column, out_stride,
                    left < COLUMNS ? left : int64_t{COLUMNS});
  }
}

// Panels of so many rows may be done twice (team.h). Of more, a phase is long enough for its pieces to even out, and a copy
// of its outputs dear.
constexpr int64_t BACKUP_ROWS = 16;

// A thread's scratch for many rows: a block of a panel in float32, and the sums of the blocks before it.
constexpr int64_t BLOCK_DEPTH = 256;  // 16 KB of a panel, which stay in the first cache while rows go by
constexpr int ASKING_ROWS = TILE_ROWS * 5 / 6;  // of a tile: more take longer than memory needs for a block
constexpr int64_t scratch_size(int64_t rows) { return (BLOCK_DEPTH + rows) * COLUMNS; }

struct LinearScratch {
  float* own;     // the thread's, scratch_size(rows)
  void* rounded;  // the team's, as of RoundedRows; null if no weights are for dot products
};

// How deep blocks of at most BLOCK_DEPTH are that are whole runs and as even as can be.
static inline int64_t even_blocks(int64_t depth) {
  const int64_t blocks = (depth + BLOCK_DEPTH - 1) / BLOCK_DEPTH;
  return (depth + blocks * RUN - 1) / (blocks * RUN) * RUN;
}

// sums [R][16] (+)= R rows times a block of a panel. Not inlined either.
template <int R, typename Source>
__attribute__((noinline)) static void multiply_block(const float* x, int64_t x_stride, const Source& block,
                                                     int64_t depth, bool is_first, float* sums) {
  Tile<R> tile;
  if (is_first)
    tile.clear();
  else
    tile.read(sums, COLUMNS);
  tile.multiply(x, x_stride, {block}, depth);
  tile.write(sums, COLUMNS);
}

// More rows than a tile: a panel goes by in blocks, each met by all rows before the next. The first tile of rows reads a
// block from memory, and widens it on its way; the others find it in the first cache in float32. Memory would have nothing
// to do meanwhile: where the first tile is so small that it waits for memory, the second asks for the next block.
template <Epilogue E, Stored S>
static void multiply_many(const float* x, int64_t x_stride, int64_t rows, const Linear& w, int64_t panel, float* out,
                          int64_t out_stride, float* scratch) {
  float* sums = scratch + BLOCK_DEPTH * COLUMNS;
  const int64_t column = panel * COLUMNS, left = w.columns - column, width = left < COLUMNS ? left : int64_t{COLUMNS};
  const float* bias = w.bias ? w.bias + column : nullptr;
  const bool asks = S == Stored::FLOAT32 && rows <= 2 * ASKING_ROWS;
  const int64_t block = asks ? even_blocks(w.depth) : BLOCK_DEPTH;
  for (int64_t start = 0; start < w.depth; start += block) {
    const int64_t depth = w.depth - start < block ? w.depth - start : block;
    const auto stored = source<S>(w, panel, start);
    for_tiles(rows, [&](auto tile_rows, int64_t first) {
      constexpr int R = decltype(tile_rows)::value;
      if constexpr (R * 2 >= TILE_ROWS) {
        float* to = sums + first * COLUMNS;
        const auto multiply_by = [&](const auto& values) {
          multiply_block<R>(x + first * x_stride + start, x_stride, values, depth, start == 0, to);
        };
        if constexpr (S != Stored::FLOAT32) {
          if (first == 0)
            multiply_by(Kept<decltype(source<S>(w, 0))>{stored, scratch});
          else
            multiply_by(Floats{scratch});
        } else {
          if (first > 0 && asks)
            multiply_by(AskingFloats{stored.values, stored.values + depth * COLUMNS});
          else
            multiply_by(stored);
        }
        if (start + depth == w.depth)
          finish_panel<E>(to, COLUMNS, R, bias, out + first * out_stride + column, out_stride, width);
      }
    });
  }
}

// At most a tile of rows: as many panels at a time as keep a core busy. Widening does that too, from a few rows on.
template <Epilogue E, Stored S>
static void multiply_few(const float* x, int64_t x_stride, int64_t rows, const Linear& w, int64_t begin, int64_t end,
                         float* out, int64_t out_stride) {
  for_tiles(rows, [&](auto tile_rows, int64_t) __attribute__((always_inline)) {
    constexpr int R = decltype(tile_rows)::value;
    constexpr int MOST = S != Stored::FLOAT32 && R > 4 ? 1 : panels_at_once(R);
    for_panels<MOST>(begin, end, [&](auto count, int64_t panel) __attribute__((always_inline)) {
      constexpr int P = decltype(count)::value;
      decltype(source<S, P>(w, 0)) sources[P];
      for (int p = 0; p < P; ++p) sources[p] = source<S, P>(w, panel + p);
      multiply_panels<E, R, P>(x, x_stride, w, sources, panel, out, out_stride);
    });
  });
}

// Panels [begin, end) for all rows.
template <Epilogue E, Stored S>
static inline void multiply(const float* x, int64_t x_stride, int64_t rows, const Linear& w, int64_t begin, int64_t end,
                            float* out, int64_t out_stride, float* scratch) {
  if (rows <= TILE_ROWS) return multiply_few<E, S>(x, x_stride, rows, w, begin, end, out, out_stride);
  for (int64_t panel = begin; panel < end; ++panel)
    multiply_many<E, S>(x, x_stride, rows, w, panel, out, out_stride, scratch);
}

template <Epilogue E>
static inline void multiply(const float* x, int64_t x_stride, int64_t rows, const Linear& w, int64_t begin, int64_t end,
                            float* out, int64_t out_stride, const LinearScratch& scratch) {
  switch (w.stored) {
    case Stored::FLOAT32:
      return multiply<E, Stored::FLOAT32>(x, x_stride, rows, w, begin, end, out, out_stride, scratch.own);
    case Stored::BFLOAT16:
      return multiply<E, Stored::BFLOAT16>(x, x_stride, rows, w, begin, end, out, out_stride, scratch.own);
    case Stored::INT8:
      return multiply<E, Stored::INT8>(x, x_stride, rows, w, begin, end, out, out_stride, scratch.own);
    case Stored::BFLOAT16_PAIRS:
      return multiply_dots<E, Stored::BFLOAT16_PAIRS>({scratch.rounded, rows, w.depth}, rows, w, begin, end, out,
                                                      out_stride);
    case Stored::INT8_QUADS:
      return multiply_dots<E, Stored::INT8_QUADS>({scratch.rounded, rows, w.depth}, rows, w, begin, end, out,
                                                  out_stride);
  }
}

// By a whole team: rounds x [rows, depth] if the weights want it.
static inline void round_rows(Team& team, const float* x, int64_t x_stride, int64_t rows, const Linear& w,
                              const LinearScratch& scratch) {
  if (!is_dots(w.stored)) return;
  const RoundedRows to{scratch.rounded, rows, w.depth};
  team.share(rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (w.stored == Stored::BFLOAT16_PAIRS)
        round_row<Stored::BFLOAT16_PAIRS>(x + row * x_stride, to, row);
      else
        round_row<Stored::INT8_QUADS>(x + row * x_stride, to, row);
    }
  });
}

// Panels [begin, end) of what a layer puts out, [rows][width], where it belongs: there, or with ADD on top of what is there.
template <Epilogue E>
static void commit(const float* results, int64_t begin, int64_t end, int64_t rows, const Linear& w, float* out,
                   int64_t out_stride) {
  const int64_t column = begin * COLUMNS, width = (end - begin) * COLUMNS, left = w.columns - column;
  const int64_t size = left < width ? left : width;
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = results + row * width;
    float* to = out + row * out_stride + column;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, finish<E>(load(to + i), load(from + i)));
    for (; i < size; ++i) to[i] = E == ADD ? to[i] + from[i] : from[i];
  }
}

// By a whole team: compute(begin, end, out, out_stride) of panels, whose outputs then go through the epilogue E.
template <Epilogue E, typename Compute>
static inline void share_panels(Team& team, int64_t rows, const Linear& w, float* out, int64_t out_stride,
                                Compute compute) {
  if (rows == 0) return;
  const int64_t most = RESULT_FLOATS / (rows * COLUMNS);
  team.share_with_backup(
      w.num_panels(), most, 1,
      [&](int64_t begin, int64_t end, float* results) {
        compute(begin, end, results - begin * COLUMNS, (end - begin) * COLUMNS);
      },
      [&](int64_t begin, int64_t end, const float* results) {
        commit<E>(results, begin, end, rows, w, out, out_stride);
      });
}

// By a whole team: x [rows, depth] → out [rows, columns] = w(x), or with ADD out += that.
template <Epilogue E>
static inline void linear(Team& team, const float* x, int64_t x_stride, int64_t rows, const Linear& w, float* out,
                          int64_t out_stride, const LinearScratch& scratch) {
  round_rows(team, x, x_stride, rows, w, scratch);
  if (rows <= BACKUP_ROWS)
    return share_panels<E>(team, rows, w, out, out_stride, [&](int64_t begin, int64_t end, float* to, int64_t stride) {
      multiply<STORE>(x, x_stride, rows, w, begin, end, to, stride, scratch);
    });
  team.share(w.num_panels(), [&](int64_t begin, int64_t end) {
    multiply<E>(x, x_stride, rows, w, begin, end, out, out_stride, scratch);
  });
}

// By a whole team: out [rows, columns] = silu(gate(x)) * up(x), SwiGLU's first half.
static inline void swiglu(Team& team, const float* x, int64_t x_stride, int64_t rows, const Linear& gate,
                          const Linear& up, float* out, int64_t out_stride, const LinearScratch& scratch) {
  round_rows(team, x, x_stride, rows, gate, scratch);
  const auto multiply_both = [&](int64_t begin, int64_t end, float* to, int64_t stride) {
    multiply<STORE>(x, x_stride, rows, gate, begin, end, to, stride, scratch);
    multiply<SILU_TIMES>(x, x_stride, rows, up, begin, end, to, stride, scratch);
  };
  if (rows <= BACKUP_ROWS) return share_panels<STORE>(team, rows, gate, out, out_stride, multiply_both);
  team.share(gate.num_panels(), [&](int64_t begin, int64_t end) { multiply_both(begin, end, out, out_stride); });
}
