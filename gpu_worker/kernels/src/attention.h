// Causal attention over KV pages: blocked, online softmax (https://arxiv.org/abs/2205.14135), nothing gathered.
//
//   positions   0        128       256       384       512                     1024
//               | block  | block   | block   | block   | …                     |
//               | split, an item for any thread        | split                 |
//
// Blocks and splits lie at absolute positions. A query's row goes block by block within a split, then its splits are
// merged in order: the same additions whoever shares its tile, its step or its threads (design §6).
#pragma once

#include "norm_rope.h"
#include "softmax.h"
#include "team.h"
#include "transpose.h"

constexpr int64_t BLOCK = 128;      // positions whose scores are held at once
constexpr int64_t SPLIT = 512;      // positions of one work item; gpu_worker/attention/cpu_backend.py has it too
constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int64_t BACKUP_FLOATS = RESULT_FLOATS / 16;  // partials of a KV head, if others may do it too
constexpr int64_t HEADS_AT_ONCE = 4;  // KV heads of few rows that go through a block together

// A run of up to a few queries of one sequence, consecutive positions. Mirrors the rows of the `tiles` argument.
struct QueryTile {
  int64_t first_row, num_queries, first_position, table_at, partial_at;
};

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

// An item for kv_heads KV heads, its own and those after it, and a split.
struct Work {
  Item item;
  int64_t kv_heads, split;

  int64_t floats() const { return kv_heads * item.rows() * item.shape.partial_size(); }
  // Where the first block lies that any row sees.
  int64_t first_block() const {
    const int64_t first = item.shape.first_seen(item.first_position);
    return first > split * SPLIT ? first / BLOCK * BLOCK : split * SPLIT;
  }
};

// Asks for the keys or values of a block that are wanted next, some tokens a step, in the order of their addresses;
// into the second cache: one head's keys alone fill the first.
struct Ahead {
  const float* from;
  const Block& block;
  int64_t stride, width;  // floats from token to token, and of a token
  int64_t per_step, at = 0;

  // Of `heads` heads, all of them in so many steps.
  Ahead(const Shape& shape, const float* from, int64_t heads, const Block& block, int64_t steps)
      : from(from), block(block), stride(shape.token_stride()), width(heads * shape.head_dim),
        per_step(block.count > 0 ? (block.count + steps - 1) / steps : 0) {}

  void step() {
    for (const int64_t end = at + per_step < block.count ? at + per_step : block.count; at < end; ++at) {
      const float* token = from + block.places[at / COLUMNS] + at % COLUMNS * stride;
      for (int64_t d = 0; d < width; d += COLUMNS) __builtin_prefetch(token + d, 0, 2);
    }
  }
};

// Where the keys or values lie that come next, 16 tokens' of one head. They are asked for into the second cache, a token
// with each that is worked on: so memory is busy all the while, in the order of its addresses.
struct Next {
  const float* from;
  int64_t stride, head_dim;  // floats from token to token, and of each

  // Of the n-th of the heads from `from` on that are worked on together. Where these are all the heads, what follows in
  // memory is asked for, whosever it is.
  Next(const Shape& shape, const float* from, int64_t n, int64_t heads)
      : from(from + n * shape.head_dim * (heads == shape.kv_heads ? COLUMNS : 1)),
        stride(heads == shape.kv_heads ? shape.head_dim : shape.token_stride()), head_dim(shape.head_dim) {}
  __attribute__((always_inline)) void ask(int64_t token, int64_t d) const {
    __builtin_prefetch(from + token * stride + d, 0, 2);
  }
};

// Values, each with one that is asked for.
struct AskingValues {
  const float *values, *asked;
  int64_t stride, asked_stride;
  AskingValues run(int64_t i) const { return {values + i * stride, asked + i * asked_stride, stride, asked_stride}; }
  __attribute__((always_inline)) void ahead(int64_t step) const { __builtin_prefetch(asked + step * asked_stride, 0, 2); }
  vec at(int64_t step, int v) const { return load(values + step * stride + v * LANES); }
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
  for_panels<R>(first, end, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
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
  for_panels<R>(0, dim / COLUMNS, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
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
  for_panels<R>(0, shape.head_dim / COLUMNS, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
    constexpr int P = decltype(panels)::value;
    Tile<R, P> product;
    product.read(partials + panel * COLUMNS, size);
    if (is_first) product.scale_rows(shrink);
    AskingValues columns[P];
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
  const auto place = [&](const float* from, int64_t at) { return from + block.places[at / COLUMNS]; };
  for (int64_t n = 0; n < heads; ++n) take_queries<R>(item.ahead(n), 0, queries[n]);
  for (int64_t at = seen.begin; at < seen.end; at += COLUMNS) {
    const float* keys = place(item.keys, at);
    const float* next = at + COLUMNS < seen.end ? place(item.keys, at + COLUMNS) : place(item.values, seen.begin);
    for (int64_t n = 0; n < heads; ++n)
      score_where_they_lie<R>(queries[n], keys + n * dim, stride, dim, scores[n] + at, {shape, next, n, heads});
  }
  for (int64_t n = 0; n < heads; ++n) {
    const Item head = item.ahead(n);
    hide<R>(head, 0, block, seen, scores[n]);
    weigh<R>(scores[n], BLOCK, seen.begin, seen.padded(), head.partials + dim, size, shrink[n]);
  }
  for (int64_t at = seen.begin; at < seen.end; at += COLUMNS) {
    const float* values = place(item.values, at);
    const float* next = at + COLUMNS < seen.end ? place(item.values, at + COLUMNS) : following ? following : values;
    const int64_t count = seen.end - at < COLUMNS ? seen.end - at : COLUMNS;
    for (int64_t n = 0; n < heads; ++n)
      weigh_where_they_lie<R>(shape, scores[n] + at, values + n * dim, count, shrink[n], at == seen.begin,
                              item.ahead(n).partials, {shape, next, n, heads});
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

// One split, block by block, so that memory is read in order. At its end it asks for the first keys of `following`, if
// any.
static void attend_split(const Work& work, const Work* following) {
  const auto& [item, kv_heads, split] = work;
  const Shape& shape = item.shape;
  const int64_t dim = shape.head_dim, rows = item.rows(), size = shape.partial_size(), last = item.last();
  for (int64_t r = 0; r < kv_heads * rows; ++r) {
    float* partial = item.partials + r * size;
    for (int64_t i = 0; i < size; ++i) partial[i] = 0.0f;
    partial[dim + COLUMNS] = NOTHING_YET;
  }
  const int64_t end = (split + 1) * SPLIT <= last ? (split + 1) * SPLIT : last + 1;
  const int64_t at_once = rows <= TILE_ROWS ? HEADS_AT_ONCE : 1;
  bool ends = false;
  for (Block block(item, work.first_block()); !ends;) {
    ends = block.first + BLOCK >= end;
    const Work& next_work = ends && following ? *following : work;
    const Block next(next_work.item, ends && following ? following->first_block() : block.first + BLOCK);
    const float* next_keys = next.count > 0 ? next_work.item.keys + next.places[0] : nullptr;
    for (int64_t n = 0; n < kv_heads; n += at_once) {
      const Item head = item.ahead(n);
      const int64_t left = kv_heads - n, heads = left < at_once ? left : at_once;
      const bool stays = left > heads;  // in this block
      const float* after = stays ? head.keys + heads * dim + block.places[0] : next_keys;
      if (rows > TILE_ROWS) {
        const int64_t steps = (block.count + COLUMNS - 1) / COLUMNS;
        Ahead values(shape, head.values, heads, block, steps);
        Ahead keys(shape, stays ? head.keys + dim : next_work.item.keys, heads, stays ? block : next, steps);
        attend_many(head, block, values, keys);
      } else {
        with_count<TILE_ROWS>(rows, [&](auto count) __attribute__((always_inline)) {
          attend_few<decltype(count)::value>(head, heads, block, after);
        });
      }
    }
    block = next;
  }
}

// One row's splits, [stride] apart, merged in order and normalized into out [head_dim].
static inline void merge(const float* partials, int64_t stride, int64_t first, int64_t last, int64_t dim, float* out) {
  float maximum = NOTHING_YET;
  for (int64_t split = first; split <= last; ++split) {
    const float part = partials[split * stride + dim + COLUMNS];
    maximum = part > maximum ? part : maximum;
  }
  vec sums{};
  for (int64_t d = 0; d < dim; ++d) out[d] = 0.0f;
  for (int64_t split = first; split <= last; ++split) {
    const float* part = partials + split * stride;
    const vec scale = exp2(broadcast(part[dim + COLUMNS] - maximum));
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(out + d) + load(part + d) * scale);
    sums += load(part + dim) * scale;
  }
  const float total = sum(sums);
  for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(out + d) / total);
}

// How a step's tokens attend. tiles: [num_tiles]; items: [num_items][2], tile and split, every pair up to the tile's last
// position. tables: page ids, a sequence's from its tiles' table_at on. partials: scratch of [head_dim + 32] for every
// query, head and split, a tile's from its partial_at on. Mirrored by gpu_worker/kernels/structs.py.
struct AttentionPlan {
  const QueryTile* tiles;
  int64_t num_tiles;
  const int64_t* items;
  int64_t num_items;
  const int64_t* tables;
  float* partials;
};

// What a step's items have in common. q: [rows, heads, head_dim], rows q_stride apart; out: the same, contiguous. keys,
// values: [pages, page_size, kv_heads, head_dim].
struct Attention {
  const float* q;
  int64_t q_stride;
  const float *keys, *values;
  float* out;
  const AttentionPlan& plan;
  const Shape& shape;
  float scale;

  const QueryTile& tile(int64_t item) const { return plan.tiles[plan.items[item * 2]]; }

  // From the i-th pair of item and KV head on, of which `left` are left: those of one item. Its partials go to `to`.
  Work work(int64_t i, int64_t left, float* to) const {
    const int64_t kv_heads = shape.kv_heads, item = i / kv_heads, kv_head = i % kv_heads, group = shape.group();
    const int64_t dim = shape.head_dim, split = plan.items[item * 2 + 1];
    const QueryTile& of = tile(item);
    return {{shape, q + of.first_row * q_stride + kv_head * group * dim, q_stride, scale, keys + kv_head * dim,
             values + kv_head * dim, plan.tables + of.table_at, of.first_position, of.num_queries, to},
            kv_heads - kv_head < left ? kv_heads - kv_head : left, split};
  }

  // A tile's: [splits][kv_heads][rows][size].
  float* partials(const QueryTile& of, int64_t split, int64_t kv_head) const {
    const int64_t rows_before = (split * shape.kv_heads + kv_head) * of.num_queries * shape.group();
    return plan.partials + (of.partial_at * shape.heads + rows_before) * shape.partial_size();
  }

  // All splits of a tile's head are done. partials: those of its KV head in the first split.
  void finish(const QueryTile& of, int64_t head, const float* partials) const {
    const int64_t group = shape.group(), rows = of.num_queries * group, size = shape.partial_size();
    for (int64_t query = 0; query < of.num_queries; ++query) {
      const int64_t position = of.first_position + query, row = query * group + head % group;
      merge(partials + row * size, shape.kv_heads * rows * size, shape.first_seen(position) / SPLIT, position / SPLIT,
            shape.head_dim, out + ((of.first_row + query) * shape.heads + head) * shape.head_dim);
    }
  }

  int64_t most_rows() const {
    int64_t most = 0;
    for (int64_t i = 0; i < plan.num_tiles; ++i) most = plan.tiles[i].num_queries > most ? plan.tiles[i].num_queries : most;
    return most * shape.group();
  }
};

// By a whole team; arguments as of Attention.
static inline void attend(Team& team, const float* q, int64_t q_stride, const float* keys, const float* values,
                          float* out, const AttentionPlan& plan, const Shape& shape, float scale) {
  const Attention all{q, q_stride, keys, values, out, plan, shape, scale};
  const int64_t kv_heads = shape.kv_heads, group = shape.group(), size = shape.partial_size();
  const int64_t total = plan.num_items * kv_heads, most_floats = all.most_rows() * size;
  const bool one_split_each = plan.num_items == plan.num_tiles;  // then nobody waits for the others' splits
  if (total == 0) return;

  // Calls body(i, work, next). Partials are in `own` one after the other, or where all find them.
  const auto for_work = [&](int64_t first, int64_t last, float* own, auto body) {
    for (int64_t i = first, next; i < last; i = next) {
      float* to = own ? own : all.partials(all.tile(i / kv_heads), plan.items[i / kv_heads * 2 + 1], i % kv_heads);
      const Work work = all.work(i, last - i, to);
      next = i + work.kv_heads;
      if (own) own += work.floats();
      // else behind every row's window
      if ((work.split + 1) * SPLIT > shape.first_seen(work.item.first_position)) body(i, work, next);
    }
  };
  const auto compute = [&](int64_t first, int64_t last, float* own) {
    for_work(first, last, own, [&](int64_t, const Work& work, int64_t next) {
      if (next == last) return attend_split(work, nullptr);
      const Work following = all.work(next, last - next, nullptr);
      attend_split(work, &following);
    });
  };
  const auto finish_heads = [&](int64_t first, int64_t last, float* own) {
    for_work(first, last, own, [&](int64_t i, const Work& work, int64_t) {
      for (int64_t n = 0; n < work.kv_heads * group; ++n)
        all.finish(all.tile(i / kv_heads), i % kv_heads * group + n, work.item.ahead(n / group).partials);
    });
  };
  if (most_floats <= BACKUP_FLOATS) {
    team.share_with_backup(total, RESULT_FLOATS / most_floats, compute, [&](int64_t first, int64_t last, float* own) {
      if (one_split_each) return finish_heads(first, last, own);
      for_work(first, last, own, [&](int64_t i, const Work& work, int64_t) {
        memcpy(all.partials(all.tile(i / kv_heads), work.split, i % kv_heads), work.item.partials,
               work.floats() * sizeof(float));
      });
    });
  } else {
    team.share(total, [&](int64_t first, int64_t last) {
      compute(first, last, nullptr);
      if (one_split_each) finish_heads(first, last, nullptr);
    });
  }
  if (one_split_each) return;
  team.share(plan.num_tiles * shape.heads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const QueryTile& of = plan.tiles[i / shape.heads];
      const int64_t head = i % shape.heads;
      all.finish(of, head, all.partials(of, 0, head / group));
    }
  });
}
