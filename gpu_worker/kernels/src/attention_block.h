// What attention does with a block of one sequence's KV: scores, weights, and the values they weigh.
#pragma once

#include "norm_rope.h"
#include "softmax.h"
#include "transpose.h"

constexpr int64_t BLOCK = 128;  // positions whose scores are held at once
constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int64_t HEADS_AT_ONCE = 4;  // KV heads of few rows that go through a block together
constexpr int64_t GROUPS_AHEAD = 2;   // of 16 tokens, that memory is asked for before they are wanted

struct Shape : HeadShape {
  int64_t page_size, window;  // window 0: all
  int64_t group() const { return heads / kv_heads; }
  int64_t token_stride() const { return kv_heads * head_dim; }
  int64_t partial_size() const { return head_dim + 2 * COLUMNS; }  // output, then as weigh()'s state
  int64_t first_seen(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

// One tile's work on one split, for one KV head. A row is query * group + head of the group.
struct Item {
  const Shape& shape;
  const float* q;  // of the group's first head, in the tile's first row
  int64_t q_stride;
  float scale;
  const float *keys, *values;  // of the KV head, in slot 0
  const int64_t* table;
  int64_t first_position, num_queries;
  float* partials;  // [rows][partial_size]

  int64_t rows() const { return num_queries * shape.group(); }
  // The same of the n-th KV head after this one.
  Item ahead(int64_t n) const {
    const int64_t dim = shape.head_dim;
    return {shape, q + n * shape.group() * dim, q_stride, scale, keys + n * dim, values + n * dim,
            table, first_position, num_queries, partials + n * rows() * shape.partial_size()};
  }
  int64_t last() const { return first_position + num_queries - 1; }
};

// [begin, end) of a block: what any of some rows sees. begin is a multiple of 16.
struct Seen {
  int64_t begin, end;
  int64_t padded() const { return (end + COLUMNS - 1) / COLUMNS * COLUMNS; }
};

// Up to BLOCK positions, as far as the item's last, and where the first of each 16 lies, counted in floats from slot 0.
struct Block {
  int64_t first, count, places[BLOCK / COLUMNS];

  Block(const Item& item, int64_t first)
      : first(first), count(item.last() + 1 - first < BLOCK ? item.last() + 1 - first : BLOCK) {
    const int64_t page_size = item.shape.page_size;
    for (int64_t at = 0; at < count; at += COLUMNS) {
      const int64_t position = first + at;
      const int64_t slot = item.table[position / page_size] * page_size + position % page_size;
      places[at / COLUMNS] = slot * item.shape.token_stride();
    }
  }
  // Positions from `at` on, a multiple of 16, that lie one after the other, up to `end`.
  int64_t run(int64_t at, int64_t end, int64_t token_stride) const {
    int64_t next = at + COLUMNS;
    while (next < end && places[next / COLUMNS] == places[at / COLUMNS] + (next - at) * token_stride) next += COLUMNS;
    return (next < end ? next : end) - at;
  }
  Seen seen(const Item& item, int64_t first_row, int64_t last_row) const {
    const int64_t group = item.shape.group(), last = item.first_position + last_row / group;
    const int64_t unseen = item.shape.first_seen(item.first_position + first_row / group) - first;
    return {unseen > 0 ? unseen / COLUMNS * COLUMNS : 0, last + 1 - first < count ? last + 1 - first : count};
  }
};

// For many rows: asks for a head's keys or values of a block that are wanted next, some tokens a step; into the second
// cache: one head's keys alone fill the first.
struct Ahead {
  const float* from;
  const Block& block;
  int64_t stride, width;  // floats from token to token, and of a token
  int64_t per_step, at = 0;

  // All of them in so many steps.
  Ahead(const Shape& shape, const float* from, const Block& block, int64_t steps)
      : from(from), block(block), stride(shape.token_stride()), width(shape.head_dim),
        per_step(block.count > 0 ? (block.count + steps - 1) / steps : 0) {}

  void step() {
    for (const int64_t end = at + per_step < block.count ? at + per_step : block.count; at < end; ++at) {
      const float* token = from + block.places[at / COLUMNS] + at % COLUMNS * stride;
      for (int64_t d = 0; d < width; d += COLUMNS) __builtin_prefetch(token + d, 0, 2);
    }
  }
};

// For few rows: where the keys or values lie that come next, 16 tokens' of one head. They are asked for into the second cache, a token
// with each that is worked on: so memory is busy all the while, in the order of its addresses.
struct Next {
  const float* from;
  int64_t stride;  // floats from token to token

  // Of the n-th of the heads from `from` on that are worked on together. Where these are all the heads, what follows in
  // memory is asked for, whosever it is.
  Next(const Shape& shape, const float* from, int64_t n, int64_t heads)
      : from(from + n * shape.head_dim * (heads == shape.kv_heads ? COLUMNS : 1)),
        stride(heads == shape.kv_heads ? shape.head_dim : shape.token_stride()) {}
  __attribute__((always_inline)) void ask(int64_t token, int64_t d) const {
    __builtin_prefetch(from + token * stride + d, 0, 2);
  }
};

// Scores of R rows of queries and 16 keys [16][stride], as Tile has them: a chain over head_dim, in order.
template <int R>
static inline void score_where_they_lie(const float* queries, const float* keys, int64_t stride, int64_t head_dim,
                                        float* scores, const Next& next) {
  for (int64_t t = 0, asked = 0; t < COLUMNS; t += LANES) {
    vec sums[R] = {};
    for (int64_t d = 0; d < head_dim; d += 4) {
      for (; asked * head_dim < (d + 4) * COLUMNS; ++asked)
        for (int64_t i = 0; i < head_dim; i += COLUMNS) next.ask(asked, i);
      vec columns[4];
      load_columns(keys + t * stride + d, stride, columns);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) sums[r] += queries[r * MAX_HEAD_DIM + d + i] * columns[i];
    }
    for (int r = 0; r < R; ++r) store(scores + r * BLOCK + t, sums[r]);
  }
}

// R rows of queries, scaled: [R][MAX_HEAD_DIM].
template <int R>
static inline void take_queries(const Item& item, int64_t row, float* queries) {
  const int64_t group = item.shape.group();
  int64_t query = row / group, head = row % group;
  for (int r = 0; r < R; ++r) {
    const float* from = item.q + query * item.q_stride + head * item.shape.head_dim;
    for (int64_t d = 0; d < item.shape.head_dim; d += LANES)
      store(queries + r * MAX_HEAD_DIM + d, load(from + d) * item.scale);
    if (++head == group) head = 0, ++query;
  }
}

// Scores of what a row does not see itself, of what any of R rows sees.
template <int R>
static inline void hide(const Item& item, int64_t row, const Block& block, const Seen& seen, float* scores) {
  const int64_t group = item.shape.group();
  for (int r = 0; r < R; ++r) {
    // the row sees [from, to), perhaps nothing of this block
    const int64_t position = item.first_position + (row + r) / group;
    const int64_t from = item.shape.first_seen(position) - block.first, to = position + 1 - block.first;
    for (int64_t i = seen.begin; i < from && i < seen.padded(); ++i) scores[r * BLOCK + i] = HIDDEN;
    for (int64_t i = to > seen.begin ? to : seen.begin; i < seen.padded(); ++i) scores[r * BLOCK + i] = HIDDEN;
  }
}

// The first half of R rows' work on a block: their scores [R][BLOCK]. key_columns: [count / 16][head_dim][16].
template <int R>
static void score_block(const Item& item, int64_t row, const Block& block, const Seen& seen, const float* key_columns,
                        float* scores) {
  alignas(64) float queries[R * MAX_HEAD_DIM];
  const int64_t dim = item.shape.head_dim, first = seen.begin / COLUMNS, end = seen.padded() / COLUMNS;
  take_queries<R>(item, row, queries);
  for_panels<panels_at_once(R)>(first, end, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
    constexpr int P = decltype(panels)::value;
    Floats columns[P];
    for (int p = 0; p < P; ++p) columns[p] = {key_columns + (panel + p) * COLUMNS * dim};
    Tile<R, P> product;
    product.clear();
    product.multiply(queries, MAX_HEAD_DIM, columns, dim);
    product.write(scores + panel * COLUMNS, BLOCK);
  });
  hide<R>(item, row, block, seen, scores);
}

// The second half: scores become weights, and the rows' partials take in the values.
template <int R>
static void weigh_block(const Item& item, int64_t row, const Block& block, const Seen& seen, float* scores) {
  alignas(64) float shrink[COLUMNS];
  const Shape& shape = item.shape;
  const int64_t dim = shape.head_dim, size = shape.partial_size(), stride = shape.token_stride();
  float* partials = item.partials + row * size;
  weigh<R>(scores, BLOCK, seen.begin, seen.padded(), partials + dim, size, shrink);
  for_panels<panels_at_once(R)>(0, dim / COLUMNS, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
    constexpr int P = decltype(panels)::value;
    Tile<R, P> product;
    product.read(partials + panel * COLUMNS, size);
    product.scale_rows(shrink);
    for (int64_t at = seen.begin, run; at < seen.end; at += run) {
      run = block.run(at, seen.end, stride);
      const float* values = item.values + block.places[at / COLUMNS];
      Floats columns[P];
      for (int p = 0; p < P; ++p) columns[p] = {values + (panel + p) * COLUMNS, stride};
      product.multiply(scores + at, BLOCK, columns, run);
    }
    product.write(partials + panel * COLUMNS, size);
  });
}

// Adds 16 or fewer values [count][token_stride] to R rows' partials; weights: [R][BLOCK].
template <int R>
static inline void weigh_where_they_lie(const Shape& shape, const float* weights, const float* values, int64_t count,
                                        const float (&shrink)[COLUMNS], bool is_first, float* partials,
                                        const Next& next) {
  const int64_t size = shape.partial_size(), stride = shape.token_stride();
  for_panels<panels_at_once(R)>(0, shape.head_dim / COLUMNS, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
    constexpr int P = decltype(panels)::value;
    Tile<R, P> product;
    product.read(partials + panel * COLUMNS, size);
    if (is_first) product.scale_rows(shrink);
    AskingFloats columns[P];
    for (int p = 0; p < P; ++p) {
      const int64_t column = (panel + p) * COLUMNS;
      columns[p] = {values + column, next.from + column, stride, next.stride};
    }
    product.multiply(weights, BLOCK, columns, count);
    product.write(partials + panel * COLUMNS, size);
  });
}

// A block of few rows, one tile, for `heads` heads: no column would be used twice, so keys are taken where they lie. All
// heads go through 16 tokens before the next. following: keys that come after, or null.
template <int R>
static void attend_few(const Item& item, int64_t heads, const Block& block, const float* following) {
  alignas(64) float queries[HEADS_AT_ONCE][R * MAX_HEAD_DIM], scores[HEADS_AT_ONCE][R * BLOCK];
  alignas(64) float shrink[HEADS_AT_ONCE][COLUMNS];
  const Shape& shape = item.shape;
  const int64_t dim = shape.head_dim, size = shape.partial_size(), stride = shape.token_stride();
  const Seen seen = block.seen(item, 0, R - 1);
  if (seen.begin >= seen.end) return;
  // Where each 16 tokens lie in the order that they are read in.
  const float* order[2 * BLOCK / COLUMNS + GROUPS_AHEAD];
  int64_t groups = 0;
  for (int64_t at = seen.begin; at < seen.end; at += COLUMNS) order[groups++] = item.keys + block.places[at / COLUMNS];
  for (int64_t at = seen.begin; at < seen.end; at += COLUMNS) order[groups++] = item.values + block.places[at / COLUMNS];
  for (int64_t i = 0; i < GROUPS_AHEAD; ++i)
    order[groups + i] = following ? following + i * COLUMNS * stride : order[groups - 1];
  const float** group = order;

  for (int64_t n = 0; n < heads; ++n) take_queries<R>(item.ahead(n), 0, queries[n]);
  for (int64_t at = seen.begin; at < seen.end; at += COLUMNS, ++group)
    for (int64_t n = 0; n < heads; ++n)
      score_where_they_lie<R>(queries[n], *group + n * dim, stride, dim, scores[n] + at,
                              {shape, group[GROUPS_AHEAD], n, heads});
  for (int64_t n = 0; n < heads; ++n) {
    const Item head = item.ahead(n);
    hide<R>(head, 0, block, seen, scores[n]);
    weigh<R>(scores[n], BLOCK, seen.begin, seen.padded(), head.partials + dim, size, shrink[n]);
  }
  for (int64_t at = seen.begin; at < seen.end; at += COLUMNS, ++group) {
    const int64_t count = seen.end - at < COLUMNS ? seen.end - at : COLUMNS;
    for (int64_t n = 0; n < heads; ++n)
      weigh_where_they_lie<R>(shape, scores[n] + at, *group + n * dim, count, shrink[n], at == seen.begin,
                              item.ahead(n).partials, {shape, group[GROUPS_AHEAD], n, heads});
  }
}

// A block of many rows, for one head: its keys become columns once for all tiles.
static void attend_many(const Item& item, const Block& block, Ahead& values, Ahead& keys) {
  alignas(64) float key_columns[MAX_HEAD_DIM * BLOCK], scores[TILE_ROWS * BLOCK];
  const int64_t dim = item.shape.head_dim;
  for (int64_t at = 0; at < block.count; at += COLUMNS) {
    values.step();
    keys.step();
    transpose(item.keys + block.places[at / COLUMNS], item.shape.token_stride(), dim, key_columns + at * dim);
  }
  for_tiles(item.rows(), [&](auto tile_rows, int64_t row) __attribute__((always_inline)) {
    constexpr int R = decltype(tile_rows)::value;
    const Seen seen = block.seen(item, row, row + R - 1);
    if (seen.begin >= seen.end) return;
    score_block<R>(item, row, block, seen, key_columns, scores);
    weigh_block<R>(item, row, block, seen, scores);
  });
}
