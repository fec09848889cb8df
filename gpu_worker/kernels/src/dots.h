// Linear layers whose inputs are rounded to the weights' type, for CPUs that add up several products a lane at once:
//
//   BFLOAT16_PAIRS   [columns / 16][depth / 2][16][2]   two products of bfloat16, sums in float32
//   INT8_QUADS       [columns / 16][depth / 4][16][4]   four products of int8, exact sums of 64; scales as of INT8
//
// depth is a multiple of 64. Inputs are rounded to nearest even, int8's with a scale for every 64 of depth: max |x| / 127.
// The instruction multiplies unsigned by signed bytes, so weights are stored as w + 128, and a sum starts at -128 times
// the sum of its inputs.
//
// Batch invariance (design §6): an output is a chain over depth by itself, as in tile.h.
#pragma once

#include "weights.h"

constexpr bool is_dots(Stored stored) { return stored == Stored::BFLOAT16_PAIRS || stored == Stored::INT8_QUADS; }

// Rows of inputs, rounded. values: [rows][depth] of bfloat16 or int8; scales and offsets (-128 times the sum of 64
// values): [rows][depth / 64], of int8 only.
struct RoundedRows {
  char* values;
  float* scales;
  int32_t* offsets;
  int64_t depth;

  // Over a buffer of rows * (2 * depth + depth / 64 * 8) bytes: rounded_row_bytes in gpu_worker/kernels/library.py.
  RoundedRows(void* buffer, int64_t rows, int64_t depth)
      : values(static_cast<char*>(buffer)),
        scales(reinterpret_cast<float*>(values + rows * depth * 2)),
        offsets(reinterpret_cast<int32_t*>(scales + rows * groups(depth))),
        depth(depth) {}
  static int64_t groups(int64_t depth) { return depth / SCALE_DEPTH; }
};

// One weight, as a float.
static inline float dots_weight(const Linear& w, int64_t panel, int64_t i, int64_t column) {
  if (w.stored == Stored::BFLOAT16_PAIRS)
    return widen(static_cast<const uint16_t*>(w.panels)[((panel * w.depth + i) / 2 * COLUMNS + column) * 2 + i % 2]);
  const int64_t scale_at = panel * RoundedRows::groups(w.depth) + i / SCALE_DEPTH;
  const uint8_t step = static_cast<const uint8_t*>(w.panels)[((panel * w.depth + i) / 4 * COLUMNS + column) * 4 + i % 4];
  return (step - 128) * w.scales[scale_at * COLUMNS + column];
}

static inline int32_t word(const char* from) {
  int32_t value;
  memcpy(&value, from, sizeof value);
  return value;
}

#if defined(__AVX512F__)

static inline __m512i line(const void* from) { return _mm512_loadu_si512(from); }

__attribute__((target("avx512bf16"))) static void round_to_bfloat16(const float* x, const RoundedRows& to, int64_t row) {
  char* values = to.values + row * to.depth * 2;
  for (int64_t i = 0; i < to.depth; i += LANES) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)load(x + i));
    memcpy(values + i * 2, &rounded, sizeof rounded);
  }
}

constexpr float SMALLEST = 4e-37f;  // 64 values no larger are rounded to 0: 127 divided by less would be infinite

// A row with a value that is not finite gets a scale that is not, and so do its outputs.
static void round_to_int8(const float* x, const RoundedRows& to, int64_t row) {
  const int64_t groups = RoundedRows::groups(to.depth);
  char* values = to.values + row * to.depth;
  for (int64_t group = 0; group < groups; ++group, x += SCALE_DEPTH, values += SCALE_DEPTH) {
    vec largest{}, nothing{};
    for (int64_t i = 0; i < SCALE_DEPTH; i += LANES) {
      const vec value = load(x + i), size = value < 0.0f ? -value : value;
      largest = larger(size, largest);
      nothing += value * 0.0f;  // NaN unless finite
    }
    const float most = highest(largest), inverse = most > SMALLEST ? 127.0f / most : 0.0f;
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < SCALE_DEPTH; i += LANES) {
      const __m512i rounded = _mm512_cvtps_epi32((__m512)(load(x + i) * inverse));
      const __m128i bytes = _mm512_cvtsepi32_epi8(rounded);
      memcpy(values + i, &bytes, sizeof bytes);
      total = _mm512_add_epi32(total, rounded);
    }
    to.scales[row * groups + group] = most / 127.0f + sum(nothing);
    to.offsets[row * groups + group] = -128 * _mm512_reduce_add_epi32(total);
  }
}

// P panels from `panel` on for R rows from `row` on: sums [R][P][16]. Asks for memory `ahead` bytes further, or past the
// end of a panel `jump` more.
template <int R, int P>
__attribute__((noinline, target("avx512bf16"))) static void dot_pairs(const RoundedRows& x, int64_t row, const Linear& w,
                                                                      int64_t panel, int64_t ahead, int64_t jump,
                                                                      float* sums) {
  const int64_t depth = w.depth;
  const uint16_t* weights = static_cast<const uint16_t*>(w.panels) + panel * depth * COLUMNS;
  const char* inputs = x.values + row * depth * 2;
  __m512 totals[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) totals[p][r] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < depth / 2; ++pair, inputs += 4) {
    const int64_t asked = pair * LINE + ahead < depth * COLUMNS * 2 ? ahead : ahead + jump;
    __m512i lines[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(reinterpret_cast<const char*>(weights + (p * depth + pair * 2) * COLUMNS) + asked, 0, 2);
      lines[p] = line(weights + p * depth * COLUMNS + pair * 2 * COLUMNS);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512i values = _mm512_set1_epi32(word(inputs + r * depth * 2));
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) totals[p][r] = _mm512_dpbf16_ps(totals[p][r], (__m512bh)lines[p], (__m512bh)values);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(sums + (r * P + p) * COLUMNS, (vec)totals[p][r]);
}

// The same for int8.
template <int R, int P>
__attribute__((noinline, target("avx512vnni"))) static void dot_quads(const RoundedRows& x, int64_t row, const Linear& w,
                                                                      int64_t panel, int64_t ahead, int64_t jump,
                                                                     float* sums) {
  const int64_t depth = w.depth, groups = RoundedRows::groups(depth);
  const uint8_t* weights = static_cast<const uint8_t*>(w.panels) + panel * depth * COLUMNS;
  const float* scales = w.scales + panel * groups * COLUMNS;
  const char* inputs = x.values + row * depth;
  const float* input_scales = x.scales + row * groups;
  const int32_t* offsets = x.offsets + row * groups;
  vec totals[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) totals[p][r] = vec{};
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t asked = (group + 1) * SCALE_DEPTH * COLUMNS + ahead <= depth * COLUMNS ? ahead : ahead + jump;
    __m512i products[P][R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512i offset = _mm512_set1_epi32(offsets[r * groups + group]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) products[p][r] = offset;
    }
    for (int64_t quad = 0; quad < SCALE_DEPTH / 4; ++quad, inputs += 4, weights += 4 * COLUMNS) {
      __m512i lines[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        __builtin_prefetch(weights + p * depth * COLUMNS + asked, 0, 2);
        lines[p] = line(weights + p * depth * COLUMNS);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m512i values = _mm512_set1_epi32(word(inputs + r * depth));
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) products[p][r] = _mm512_dpbusd_epi32(products[p][r], lines[p], values);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const vec scale = load(scales + (p * groups + group) * COLUMNS);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        totals[p][r] += (vec)_mm512_cvtepi32_ps(products[p][r]) * (scale * input_scales[r * groups + group]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) store(sums + (r * P + p) * COLUMNS, totals[p][r]);
}

template <Stored S>
static inline void round_row(const float* x, const RoundedRows& to, int64_t row) {
  if constexpr (S == Stored::BFLOAT16_PAIRS) round_to_bfloat16(x, to, row);
  if constexpr (S == Stored::INT8_QUADS) round_to_int8(x, to, row);
}

template <Stored S, int R, int P>
static inline void dot_panels(const RoundedRows& x, int64_t row, const Linear& w, int64_t panel, int64_t ahead,
                              int64_t jump, float* sums) {
  if constexpr (S == Stored::BFLOAT16_PAIRS) dot_pairs<R, P>(x, row, w, panel, ahead, jump, sums);
  if constexpr (S == Stored::INT8_QUADS) dot_quads<R, P>(x, row, w, panel, ahead, jump, sums);
}

#else  // never chosen: cpu_dots_… of cpu.cpp

template <Stored S>
static inline void round_row(const float*, const RoundedRows&, int64_t) {
  __builtin_trap();
}

template <Stored S, int R, int P>
static inline void dot_panels(const RoundedRows&, int64_t, const Linear&, int64_t, int64_t, int64_t, float*) {
  __builtin_trap();
}

#endif

// A tile's rows, and the panels it takes at once: of int8 it has sums of two kinds, and all must fit the registers.
template <Stored S>
struct DotTile {
  static constexpr int ROWS = S == Stored::BFLOAT16_PAIRS ? 12 : 6;
  static constexpr int panels(int64_t rows) { return rows * 2 < ROWS ? 4 : 2; }
};

template <Stored S>
static inline int64_t panel_bytes(const Linear& w) {
  return w.depth * COLUMNS * (S == Stored::BFLOAT16_PAIRS ? 2 : 1);
}

// Panels [begin, end) for all rows, each panel met by all rows before the next: the first tile reads them from memory,
// the second asks for those after them.
template <Epilogue E, Stored S>
static void multiply_dots(const RoundedRows& x, int64_t rows, const Linear& w, int64_t begin, int64_t end, float* out,
                          int64_t out_stride) {
  constexpr int ROWS = DotTile<S>::ROWS;
  const int64_t tiles = (rows + ROWS - 1) / ROWS, first_rows = (rows + tiles - 1) / tiles;
  const auto multiply = [&](auto row_count, auto panel_count, int64_t row, int64_t panel) {
    constexpr int R = decltype(row_count)::value, P = decltype(panel_count)::value;
    alignas(64) float sums[R * P * COLUMNS];
    const int64_t ahead = row == 0 ? LINES_AHEAD * LINE : row == first_rows ? P * panel_bytes<S>(w) : 0;
    const int64_t jump = R == rows ? (P - 1) * panel_bytes<S>(w) : 0;
    dot_panels<S, R, P>(x, row, w, panel, ahead, jump, sums);
    for (int p = 0; p < P; ++p) {
      const int64_t column = (panel + p) * COLUMNS, left = w.columns - column;
      finish_panel<E>(sums + p * COLUMNS, P * COLUMNS, R, w.bias ? w.bias + column : nullptr,
                      out + row * out_stride + column, out_stride, left < COLUMNS ? left : int64_t{COLUMNS});
    }
  };
  const int64_t at_once = DotTile<S>::panels(rows);  // also of every tile: of several, none has less than half its rows
  for (int64_t panel = begin, taken; panel < end; panel += taken) {
    taken = end - panel < at_once ? 1 : at_once;
    for_tiles<ROWS>(rows, [&](auto row_count, int64_t row) {
      constexpr int P = DotTile<S>::panels(decltype(row_count)::value);
      if (taken == P)
        multiply(row_count, Count<P>{}, row, panel);
      else
        multiply(row_count, Count<1>{}, row, panel);
    });
  }
}
