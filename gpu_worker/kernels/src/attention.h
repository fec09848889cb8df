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
#include "team.h"
#include "tile.h"

constexpr int64_t BLOCK = 128;      // positions whose scores are held at once
constexpr int64_t KEYS_AHEAD = 64;  // positions between the keys asked for and those that are read
constexpr int64_t SPLIT = 512;      // positions of one work item; gpu_worker/attention/cpu_backend.py has it too
constexpr int64_t ITEM_ROWS = 64;   // query rows (a query times a head) that share a block's K and V
constexpr int64_t MAX_HEAD_DIM = 256;
constexpr float NOTHING = -__builtin_inff();  // maximum of a row that has seen no key

// A run of up to a few queries of one sequence, consecutive positions. Mirrors the rows of the `tiles` argument.
struct QueryTile {
  int64_t first_row, num_queries, first_position, table_at, partial_at;
};

struct Shape : HeadShape {
  int64_t page_size, window;  // window 0: all
  int64_t group() const { return heads / kv_heads; }
  int64_t token_stride() const { return kv_heads * head_dim; }
  int64_t partial_size() const { return head_dim + COLUMNS; }  // output, maximum, sum of weights, padding
  int64_t first_seen(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
};

// tokens [count ≤ 16][stride] → columns [head_dim][16], absent tokens 0
static inline void transpose(const float* tokens, int64_t stride, int64_t count, int64_t head_dim, float* columns) {
  for (int64_t t = 0; t < COLUMNS; t += 4) {
    for (int64_t d = 0; d < head_dim; d += 4) {
      vec4 rows[4];
      for (int64_t i = 0; i < 4; ++i) {
        rows[i] = vec4{};
        if (t + i < count) rows[i] = *reinterpret_cast<const vec4_in_memory*>(tokens + (t + i) * stride + d);
      }
      const vec4 low01 = __builtin_shuffle(rows[0], rows[1], ivec4{0, 4, 1, 5});
      const vec4 high01 = __builtin_shuffle(rows[0], rows[1], ivec4{2, 6, 3, 7});
      const vec4 low23 = __builtin_shuffle(rows[2], rows[3], ivec4{0, 4, 1, 5});
      const vec4 high23 = __builtin_shuffle(rows[2], rows[3], ivec4{2, 6, 3, 7});
      const vec4 out[4] = {
          __builtin_shuffle(low01, low23, ivec4{0, 1, 4, 5}), __builtin_shuffle(low01, low23, ivec4{2, 3, 6, 7}),
          __builtin_shuffle(high01, high23, ivec4{0, 1, 4, 5}), __builtin_shuffle(high01, high23, ivec4{2, 3, 6, 7})};
      for (int64_t i = 0; i < 4; ++i)
        *reinterpret_cast<vec4_in_memory*>(columns + (d + i) * COLUMNS + t) = out[i];
    }
  }
}

// Asks for the heads of 16 tokens that will be read soon. Some may be beyond the last: nothing comes of it.
static inline void fetch(const float* tokens, int64_t stride, int64_t head_dim) {
  for (int64_t t = 0; t < COLUMNS; ++t)
    for (int64_t d = 0; d < head_dim; d += COLUMNS) __builtin_prefetch(tokens + t * stride + d);
}

// Softmax weights of one row in place, [from, to) of scores [BLOCK] seen; 0 for the others of [0, padded).
// Updates the row's maximum and sum; returns the factor by which what it had so far shrinks.
static inline float weigh(float* scores, int64_t from, int64_t to, int64_t padded, float& maximum, float& total) {
  if (from >= to) {
    for (int64_t i = 0; i < padded; ++i) scores[i] = 0.0f;
    return 1.0f;
  }
  for (int64_t i = 0; i < from; ++i) scores[i] = NOTHING;
  for (int64_t i = to; i < padded; ++i) scores[i] = NOTHING;
  vec maxima = broadcast(maximum);
  for (int64_t i = 0; i < padded; i += LANES) {
    const vec s = load(scores + i);
    maxima = s > maxima ? s : maxima;
  }
  const float new_maximum = highest(maxima);
  for (int64_t i = 0; i < padded; i += LANES) store(scores + i, exp(load(scores + i) - new_maximum));
  for (int64_t i = 0; i < from; ++i) scores[i] = 0.0f;
  for (int64_t i = to; i < padded; ++i) scores[i] = 0.0f;
  vec weights{};
  for (int64_t i = 0; i < padded; i += LANES) weights += load(scores + i);
  const float shrink = exp(maximum - new_maximum);
  maximum = new_maximum;
  total = total * shrink + sum(weights);
  return shrink;
}

// Rows [begin, end) of one tile and KV head over one split. A row is query * group + head of the group.
static void attend_split(const float* q, int64_t q_stride, const float* keys, const float* values, float* partials,
                         const QueryTile& tile, const int64_t* table, const Shape& shape, int64_t kv_head,
                         int64_t split, int64_t begin, int64_t end, float scale) {
  alignas(64) float queries[ITEM_ROWS * MAX_HEAD_DIM], scores[ITEM_ROWS * BLOCK], key_columns[MAX_HEAD_DIM * BLOCK];
  const int64_t group = shape.group(), dim = shape.head_dim, rows = end - begin, size = shape.partial_size();
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t query = (begin + r) / group, head = kv_head * group + (begin + r) % group;
    const float* from = q + (tile.first_row + query) * q_stride + head * dim;
    for (int64_t d = 0; d < dim; ++d) queries[r * dim + d] = from[d] * scale;
    float* partial = partials + r * size;
    for (int64_t d = 0; d < dim; ++d) partial[d] = 0.0f;
    partial[dim] = NOTHING;
    partial[dim + 1] = 0.0f;
  }
  // [first seen by any row, last seen by any row] of this split, whole blocks
  const int64_t first = shape.first_seen(tile.first_position + begin / group);
  const int64_t last = tile.first_position + (end - 1) / group;
  const int64_t split_end = (split + 1) * SPLIT <= last ? (split + 1) * SPLIT : last + 1;
  int64_t block = split * SPLIT;
  if (first > block) block = first / BLOCK * BLOCK;
  for (; block < split_end; block += BLOCK) {
    const int64_t count = split_end - block < BLOCK ? split_end - block : BLOCK;
    const auto slot = [&](int64_t at) {  // of the token `at` positions into the block
      const int64_t position = block + at;
      const int64_t page = table[position / shape.page_size];
      return (page * shape.page_size + position % shape.page_size) * shape.token_stride() + kv_head * dim;
    };
    for (int64_t at = 0; at < count; at += COLUMNS) {
      if (rows <= TILE_ROWS) {  // too little work to hide where K and V come from
        if (block + at + KEYS_AHEAD < split_end) fetch(keys + slot(at + KEYS_AHEAD), shape.token_stride(), dim);
        fetch(values + slot(at), shape.token_stride(), dim);
      }
      transpose(keys + slot(at), shape.token_stride(), count - at, dim, key_columns + at * dim);
    }
    for_tiles(rows, [&](auto tile_rows, int64_t row) __attribute__((always_inline)) {
      constexpr int R = decltype(tile_rows)::value;
      for_panels<R>(0, (count + COLUMNS - 1) / COLUMNS, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
        constexpr int P = decltype(panels)::value;
        Floats columns[P];
        for (int p = 0; p < P; ++p) columns[p] = {key_columns + (panel + p) * COLUMNS * dim};
        Tile<R, P> product;
        product.clear();
        product.multiply(queries + row * dim, dim, columns, dim);
        product.write(scores + row * BLOCK + panel * COLUMNS, BLOCK);
      });
    });
    const int64_t padded = (count + COLUMNS - 1) / COLUMNS * COLUMNS;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = tile.first_position + (begin + r) / group;
      const int64_t from = shape.first_seen(position) - block, to = position + 1 - block;
      float* partial = partials + r * size;
      const float shrink = weigh(scores + r * BLOCK, from > 0 ? from : 0, to < count ? to : count, padded,
                                 partial[dim], partial[dim + 1]);
      for (int64_t d = 0; d < dim; ++d) partial[d] *= shrink;
    }
    for (int64_t at = 0; at < count;) {  // as far as tokens lie in one page
      const int64_t left_in_page = shape.page_size - (block + at) % shape.page_size;
      const int64_t run = left_in_page < count - at ? left_in_page : count - at;
      const float* run_values = values + slot(at);
      for_tiles(rows, [&](auto tile_rows, int64_t row) __attribute__((always_inline)) {
        constexpr int R = decltype(tile_rows)::value;
        for_panels<R>(0, dim / COLUMNS, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
          constexpr int P = decltype(panels)::value;
          Floats columns[P];
          for (int p = 0; p < P; ++p) columns[p] = {run_values + (panel + p) * COLUMNS, shape.token_stride()};
          Tile<R, P> product;
          product.read(partials + row * size + panel * COLUMNS, size);
          product.multiply(scores + row * BLOCK + at, BLOCK, columns, run);
          product.write(partials + row * size + panel * COLUMNS, size);
        });
      });
      at += run;
    }
  }
}

// One row's splits, [stride] apart, merged in order and normalized into out [head_dim].
static inline void merge(const float* partial, int64_t stride, int64_t first, int64_t last, int64_t dim, float* out) {
  float maximum = NOTHING, total = 0.0f;
  for (int64_t d = 0; d < dim; ++d) out[d] = 0.0f;
  for (int64_t split = first; split <= last; ++split) {
    const float* part = partial + split * stride;
    const float part_maximum = part[dim], part_total = part[dim + 1];
    if (part_total == 0.0f) continue;  // saw nothing there
    const float new_maximum = part_maximum > maximum ? part_maximum : maximum;
    const float old_scale = total == 0.0f ? 0.0f : exp(maximum - new_maximum);
    const float part_scale = exp(part_maximum - new_maximum);
    for (int64_t d = 0; d < dim; ++d) out[d] = out[d] * old_scale + part[d] * part_scale;
    total = total * old_scale + part_total * part_scale;
    maximum = new_maximum;
  }
  for (int64_t d = 0; d < dim; ++d) out[d] /= total;
}

// How a step's tokens attend. tiles: [num_tiles]; items: [num_items][2], tile and split, every pair up to the tile's last
// position. tables: page ids, a sequence's from its tiles' table_at on. partials: scratch of [head_dim + 16] for every
// query, head and split, a tile's from its partial_at on. Mirrored by gpu_worker/kernels/library.py.
struct AttentionPlan {
  const QueryTile* tiles;
  int64_t num_tiles;
  const int64_t* items;
  int64_t num_items;
  const int64_t* tables;
  float* partials;
};

// By a whole team. q: [rows, heads, head_dim], rows q_stride apart; out: the same, contiguous. keys, values: [pages,
// page_size, kv_heads, head_dim].
static inline void attend(Team& team, const float* q, int64_t q_stride, const float* keys, const float* values,
                          float* out, const AttentionPlan& plan, const Shape& shape, float scale) {
  const int64_t size = shape.partial_size(), group = shape.group(), kv_heads = shape.kv_heads, heads = shape.heads;
  team.share(plan.num_items * kv_heads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t* item = plan.items + i / kv_heads * 2;
      const QueryTile& tile = plan.tiles[item[0]];
      const int64_t kv_head = i % kv_heads, split = item[1], rows = tile.num_queries * group;
      if ((split + 1) * SPLIT <= shape.first_seen(tile.first_position)) continue;  // behind every row's window
      // a tile's partials: [splits][kv_heads][rows][size]
      float* to = plan.partials + (tile.partial_at * heads + (split * kv_heads + kv_head) * rows) * size;
      for (int64_t begin = 0; begin < rows; begin += ITEM_ROWS) {
        const int64_t end = rows - begin < ITEM_ROWS ? rows : begin + ITEM_ROWS;
        attend_split(q, q_stride, keys, values, to + begin * size, tile, plan.tables + tile.table_at, shape, kv_head,
                     split, begin, end, scale);
      }
    }
  });
  team.share(plan.num_tiles * heads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const QueryTile& tile = plan.tiles[i / heads];
      const int64_t head = i % heads, kv_head = head / group, rows = tile.num_queries * group;
      for (int64_t query = 0; query < tile.num_queries; ++query) {
        const int64_t position = tile.first_position + query, row = query * group + head % group;
        merge(plan.partials + (tile.partial_at * heads + kv_head * rows + row) * size, kv_heads * rows * size,
              shape.first_seen(position) / SPLIT, position / SPLIT, shape.head_dim,
              out + ((tile.first_row + query) * heads + head) * shape.head_dim);
      }
    }
  });
}
