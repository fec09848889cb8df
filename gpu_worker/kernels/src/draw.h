// Draws tokens, as gpu_worker/sampler.py says, in double:
//
//   bias, mask, penalties ▸ temperature ▸ top-k ▸ top-p ▸ min-p ▸ inverse CDF
//
// All filters keep the likeliest first, of equal ones the lowest id: each is a cut in that one order. Nothing is sorted: of
// the one bucket of scores that a cut goes through, the likeliest come off a heap until there are enough.
//
//   scores   0 (the likeliest)                       the lowest, or LEAST_SCORE and all below
//            | bucket 0 | 1 | 2                      …      | 511
#pragma once

#include "team.h"

// A row, and how to draw from it. Its logits change before: changes [0, scaled_from) and [scaled_to, num_changes) are
// added to those of `changed`; by those between, positive logits are divided and negative ones multiplied. Mirrored by
// gpu_worker/kernels/structs.py.
struct Draw {
  const float* logits;  // [columns]
  const int64_t* changed;
  const double* changes;
  int64_t scaled_from, scaled_to, num_changes;
  double temperature, top_p, min_p, uniform;  // temperature 0: the first of the largest
  int64_t top_k;                              // 0: all
};

constexpr int64_t BUCKETS = 512, HISTOGRAMS = 4, CDF_BLOCK = 64;
constexpr double LEAST_SCORE = -750.0;  // what is lower has no weight
constexpr int DOUBLES = LANES / 2;
constexpr int64_t NO_TOKEN = -1;

typedef double dvec __attribute__((vector_size(LANES * 4)));
typedef int64_t lvec __attribute__((vector_size(LANES * 4)));
typedef double dvec_in_memory __attribute__((vector_size(LANES * 4), aligned(8), may_alias));
typedef float half_vec __attribute__((vector_size(LANES * 2)));
typedef float half_vec_in_memory __attribute__((vector_size(LANES * 2), aligned(4), may_alias));

static inline dvec load(const double* from) { return *reinterpret_cast<const dvec_in_memory*>(from); }
static inline void store(double* to, dvec value) { *reinterpret_cast<dvec_in_memory*>(to) = value; }
static inline dvec load_doubles(const float* from) {
  return __builtin_convertvector(*reinterpret_cast<const half_vec_in_memory*>(from), dvec);
}

// e^x for x ≤ 0 to about 1 ulp: x = n ln 2 + r, Taylor's series in r, times 2^n. 0 below e^-700.
static inline dvec exp(dvec x) {
  const dvec clamped = x < -700.0 ? dvec{} - 700.0 : x;
  const dvec magic = dvec{} + 6755399441055744.0;  // 1.5 * 2^52: the low mantissa bits of a sum are an integer
  const dvec shifted = clamped * 1.4426950408889634 + magic, whole = shifted - magic;
  const dvec r = (clamped - whole * 6.93147180369123816490e-1) - whole * 1.90821492927058770002e-10;
  constexpr double FACTORIALS[] = {1.0, 1.0, 2.0, 6.0, 24.0, 120.0, 720.0, 5040.0, 40320.0, 362880.0, 3628800.0,
                                   39916800.0, 479001600.0, 6227020800.0};
  dvec p = dvec{} + 1.0 / FACTORIALS[13];
#pragma GCC unroll 13
  for (int i = 12; i >= 0; --i) p = p * r + 1.0 / FACTORIALS[i];
  const lvec n = reinterpret_cast<lvec>(shifted) - reinterpret_cast<lvec>(magic);
  const dvec value = reinterpret_cast<dvec>(reinterpret_cast<lvec>(p) + (n << 52));
  return x < -700.0 ? dvec{} : value;
}

struct Candidate {
  double score, weight;
  int64_t column;
  bool before(const Candidate& other) const {
    return score > other.score || (score == other.score && column < other.column);
  }
};

// A heap of candidates, the first of all on top. No library's may be included (kernels.cpp).
struct Heap {
  Candidate* of;
  int64_t count;

  Heap(Candidate* of, int64_t count) : of(of), count(count) {
    for (int64_t at = count / 2; at-- > 0;) sink(at);
  }
  Candidate take() {
    const Candidate first = of[0];
    of[0] = of[--count];
    sink(0);
    return first;
  }
  void sink(int64_t at) {
    const Candidate sinking = of[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
      if (child + 1 < count && of[child + 1].before(of[child])) ++child;
      if (!of[child].before(sinking)) break;
      of[at] = of[child];
    }
    of[at] = sinking;
  }
};

// One row's scores and weights: scratch of three doubles a column for candidates, one for each of the others.
struct Row {
  int64_t columns;
  double *scores, *weights;  // [columns]
  Candidate* candidates;     // [columns]
  double buckets_in_one = 0.0;
  int64_t counts[BUCKETS];
  double sums[BUCKETS];
  // What is kept: scores above, and of those level with it, columns up to.
  double lowest = -__builtin_inf();
  int64_t last_column;

  Row(int64_t columns, double* scratch)
      : columns(columns), scores(scratch), weights(scratch + columns),
        candidates(reinterpret_cast<Candidate*>(scratch + 2 * columns)), last_column(columns) {}

  int64_t bucket(double score) const {
    const double place = score * -buckets_in_one;
    return place < BUCKETS - 1 ? static_cast<int64_t>(place) : BUCKETS - 1;
  }
  bool keeps(double score, int64_t column) const {
    return score > lowest || (score == lowest && column <= last_column);
  }

  void take(const Draw& how) {
    int64_t i = 0;
    for (; i + DOUBLES <= columns; i += DOUBLES) store(scores + i, load_doubles(how.logits + i));
    for (; i < columns; ++i) scores[i] = how.logits[i];
    for (int64_t n = 0; n < how.num_changes; ++n) {
      double& score = scores[how.changed[n]];
      const double by = how.changes[n];
      if (n < how.scaled_from || n >= how.scaled_to)
        score += by;
      else
        score = score > 0.0 ? score / by : score * by;
    }
  }

  // NaN if any score is.
  double largest() const {
    dvec most = dvec{} - __builtin_inf();
    lvec is_nan{};
    int64_t i = 0;
    for (; i + DOUBLES <= columns; i += DOUBLES) {
      const dvec score = load(scores + i);
      most = score > most ? score : most;
      is_nan |= score != score;
    }
    double found = -__builtin_inf();
    for (int lane = 0; lane < DOUBLES; ++lane) {
      if (is_nan[lane]) return __builtin_nan("");
      if (most[lane] > found) found = most[lane];
    }
    for (; i < columns; ++i) {
      if (scores[i] != scores[i]) return scores[i];
      if (scores[i] > found) found = scores[i];
    }
    return found;
  }

  int64_t first_at(double score) const {
    int64_t i = 0;
    while (scores[i] != score) ++i;
    return i;
  }

  // Scores become relative to the best, and weights what they stand for.
  void weigh(double best, double temperature) {
    int64_t i = 0;
    for (; i + DOUBLES <= columns; i += DOUBLES) {
      const dvec score = (load(scores + i) - best) / temperature;
      store(scores + i, score);
      store(weights + i, exp(score));
    }
    for (; i < columns; ++i) {
      scores[i] = (scores[i] - best) / temperature;
      weights[i] = exp(dvec{} + scores[i])[0];
    }
  }

  // Shares the scores out among the buckets, which reach as far as they do. Several histograms side by side, so that
  // neighbours in one bucket do not wait for each other.
  void count() {
    double least = -1e-300;
    for (int64_t i = 0; i < columns; ++i) least = scores[i] < least && scores[i] >= LEAST_SCORE ? scores[i] : least;
    buckets_in_one = BUCKETS / -least;
    int64_t all_counts[HISTOGRAMS][BUCKETS] = {};
    double all_sums[HISTOGRAMS][BUCKETS] = {};
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t of = bucket(scores[i]);
      ++all_counts[i % HISTOGRAMS][of];
      all_sums[i % HISTOGRAMS][of] += weights[i];
    }
    for (int64_t b = 0; b < BUCKETS; ++b) {
      counts[b] = 0;
      sums[b] = 0.0;
      for (int64_t h = 0; h < HISTOGRAMS; ++h) {
        counts[b] += all_counts[h][b];
        sums[b] += all_sums[h][b];
      }
    }
  }

  double mass() const {
    double sum = 0.0;
    for (double of : sums) sum += of;
    return sum;
  }

  // What is kept of a bucket.
  Heap kept_of(int64_t wanted) {
    int64_t found = 0;
    for (int64_t i = 0; i < columns; ++i)
      if (bucket(scores[i]) == wanted && keeps(scores[i], i)) candidates[found++] = {scores[i], weights[i], i};
    return {candidates, found};
  }

  // Keeps the likeliest of what is kept until enough(count, mass) of them. Returns their mass.
  template <typename Enough>
  double cut(Enough enough) {
    int64_t count = 0;
    double mass = 0.0;
    for (int64_t b = 0; b < BUCKETS; ++b) {
      if (counts[b] == 0) continue;
      const bool is_cut = lowest > -__builtin_inf() && bucket(lowest) == b;  // by an earlier filter
      if (!is_cut && !enough(count + counts[b], mass + sums[b])) {
        count += counts[b];
        mass += sums[b];
        continue;
      }
      if (sums[b] == 0.0) return mass;  // nor has what is less likely any weight: keeping it changes nothing
      for (Heap heap = kept_of(b); heap.count > 0;) {
        const Candidate next = heap.take();
        if (next.weight == 0.0) return mass;
        mass += next.weight;
        if (!enough(++count, mass)) continue;
        lowest = next.score, last_column = next.column;
        return mass;
      }
      if (is_cut) return mass;
    }
    return mass;
  }

  // Takes the weight of what is not kept, of columns [first, end); returns the sum of the others'.
  double drop(int64_t first, int64_t end, double least_weight) {
    dvec sums{};
    int64_t i = first;
    lvec at{};
    for (int lane = 0; lane < DOUBLES; ++lane) at[lane] = first + lane;
    for (; i + DOUBLES <= end; i += DOUBLES, at += DOUBLES) {
      const dvec score = load(scores + i), weight = load(weights + i);
      const lvec kept = (score > lowest) | ((score == lowest) & (at <= last_column));
      const dvec left = kept & (weight >= least_weight) ? weight : dvec{};
      store(weights + i, left);
      sums += left;
    }
    double sum = 0.0;
    for (int lane = 0; lane < DOUBLES; ++lane) sum += sums[lane];
    for (; i < end; ++i) {
      if (weights[i] < least_weight || !keeps(scores[i], i)) weights[i] = 0.0;
      sum += weights[i];
    }
    return sum;
  }

  // The kept column where the sum of weights first exceeds `uniform` of all.
  int64_t draw(double uniform, double least_weight) {
    double* blocks = reinterpret_cast<double*>(candidates);
    double total = 0.0;
    for (int64_t first = 0, block = 0; first < columns; first += CDF_BLOCK, ++block) {
      const int64_t end = first + CDF_BLOCK < columns ? first + CDF_BLOCK : columns;
      total += blocks[block] = drop(first, end, least_weight);
    }
    const double wanted = uniform * total;
    double sum = 0.0;
    int64_t last = 0;  // block with any weight
    for (int64_t block = 0; block * CDF_BLOCK < columns; ++block) {
      if (blocks[block] == 0.0) continue;
      if (sum + blocks[block] > wanted) return draw_within(block, wanted - sum);
      sum += blocks[block];
      last = block;
    }
    return draw_within(last, blocks[last]);  // all of it was wanted, but for rounding
  }

  // The column of a block where the sum of its weights first exceeds `wanted`; where rounding keeps it from that, the last
  // with any weight.
  int64_t draw_within(int64_t block, double wanted) const {
    const int64_t first = block * CDF_BLOCK, end = first + CDF_BLOCK < columns ? first + CDF_BLOCK : columns;
    double sum = 0.0;
    int64_t found = NO_TOKEN;
    for (int64_t i = first; i < end && sum <= wanted; ++i) {
      if (weights[i] == 0.0) continue;
      sum += weights[i];
      found = i;
    }
    return found;
  }
};

static int64_t draw(const Draw& how, int64_t columns, double* scratch) {
  Row row(columns, scratch);
  row.take(how);
  const double best = row.largest();
  if (!(best > -__builtin_inf() && best < __builtin_inf())) return NO_TOKEN;
  if (how.temperature == 0.0) return row.first_at(best);
  row.weigh(best, how.temperature);
  const bool cuts = how.top_k > 0 && how.top_k < columns;
  if (cuts || how.top_p < 1.0) {
    row.count();
    const double mass = cuts ? row.cut([&](int64_t count, double) { return count >= how.top_k; }) : row.mass();
    if (how.top_p < 1.0) row.cut([&](int64_t, double sum) { return sum >= how.top_p * mass; });
  }
  return row.draw(how.uniform, how.min_p);
}

// By a whole team, a row by a thread. tokens: [rows], NO_TOKEN where nothing can be drawn; scratch: for each thread, 5
// doubles a column.
static inline void draw(Team& team, int64_t thread, const Draw* draws, int64_t rows, int64_t columns, double* scratch,
                        int64_t* tokens) {
  double* own = scratch + thread * 5 * columns;
  team.share(rows, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) tokens[i] = draw(draws[i], columns, own);
  });
}
