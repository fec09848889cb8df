// The largest value of each row, and where it first is.
#pragma once

#include "team.h"

// NaN if any of the row's values is. Mirrored by gpu_worker/kernels/structs.py.
struct Largest {
  double value;
  int64_t column;  // any, of NaN
};

constexpr int64_t PART_COLUMNS = 4096;  // searched by one thread at a time
static inline int64_t parts_of(int64_t columns) { return (columns + PART_COLUMNS - 1) / PART_COLUMNS; }

// The larger of two, the first of them if they are equal; NaN before all.
static inline void take_larger(Largest& of, double value, int64_t column) {
  if (of.value != of.value) return;
  if (value > of.value || value != value) of = {value, column};
}

static inline Largest largest_of(const float* values, int64_t begin, int64_t end) {
  Largest found{values[begin], begin};
  int64_t i = begin;
  if (end - begin >= LANES) {
    vec most = load(values + begin);
    ivec steps{}, is_nan = most != most;  // of LANES, from begin on
    int32_t step = 0;
    for (i += LANES; i + LANES <= end; i += LANES) {
      const vec value = load(values + i);
      const ivec is_larger = value > most;
      ++step;
      most = is_larger ? value : most;
      steps = is_larger ? ivec{} + step : steps;
      is_nan |= value != value;
    }
    for (int lane = 0; lane < LANES; ++lane) {
      const int64_t column = begin + int64_t{steps[lane]} * LANES + lane;
      if (is_nan[lane]) return {__builtin_nan(""), column};
      if (most[lane] > found.value || (most[lane] == found.value && column < found.column)) found = {most[lane], column};
    }
  }
  for (; i < end; ++i) take_larger(found, values[i], i);
  return found;
}

// By a whole team. values: [rows, columns], at least one column; parts: scratch [rows, parts_of(columns)]; found: [rows].
static inline void largest(Team& team, const float* values, int64_t rows, int64_t columns, Largest* parts,
                           Largest* found) {
  const int64_t num_parts = parts_of(columns);
  team.share(rows * num_parts, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % num_parts * PART_COLUMNS, end = begin + PART_COLUMNS;
      parts[i] = largest_of(values + i / num_parts * columns, begin, end < columns ? end : columns);
    }
  });
  team.share(rows, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      found[row] = parts[row * num_parts];
      for (int64_t p = 1; p < num_parts; ++p)
        take_larger(found[row], parts[row * num_parts + p].value, parts[row * num_parts + p].column);
    }
  });
}
