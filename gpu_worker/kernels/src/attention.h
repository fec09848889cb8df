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

constexpr int64_t BLOCK = 128;      // positions whose scores are held at once
constexpr int64_t SPLIT = 512;      // positions of one work item; gpu_worker/attention/cpu_backend.py has it too
constexpr int64_t MAX_HEAD_DIM = 256;

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

// Asks for the heads of 16 tokens of the next block, into the second cache: a block fills the first. Some may be beyond
// the last token: nothing comes of it.
static inline void fetch(const float* tokens, int64_t stride, int64_t head_dim) {
  for (int64_t t = 0; t < COLUMNS; ++t)
    for (int64_t d = 0; d < head_dim; d += COLUMNS) __builtin_prefetch(tokens + t * stride + d, 0, 2);
}

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
};

// R rows from `row` on and a block, whose keys are in columns [count / 16][head_dim][16].
template <int R>
static void attend_block(const Item& item, int64_t row, const Block& block, const float* key_columns) {
  alignas(64) float queries[R * MAX_HEAD_DIM], scores[R * BLOCK], shrink[COLUMNS];
  const Shape& shape = item.shape;
  const int64_t dim = shape.head_dim, group = shape.group(), size = shape.partial_size();
  const int64_t first = item.first_position + row / group, last = item.first_position + (row + R - 1) / group;
  // [begin, end) of the block: what any of these rows sees
  const int64_t unseen = shape.first_seen(first) - block.first, begin = unseen > 0 ? unseen / COLUMNS * COLUMNS : 0;
  const int64_t end = last + 1 - block.first < block.count ? last + 1 - block.first : block.count;
  const int64_t padded = (end + COLUMNS - 1) / COLUMNS * COLUMNS;
  if (begin >= end) return;
  int64_t query = row / group, head = row % group;
  int64_t positions[R];
  for (int r = 0; r < R; ++r) {
    const float* from = item.q + query * item.q_stride + head * dim;
    for (int64_t d = 0; d < dim; ++d) queries[r * MAX_HEAD_DIM + d] = from[d] * item.scale;
    positions[r] = item.first_position + query;
    if (++head == group) head = 0, ++query;
  }
  for_panels<R>(begin / COLUMNS, padded / COLUMNS, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
    constexpr int P = decltype(panels)::value;
    Floats columns[P];
    for (int p = 0; p < P; ++p) columns[p] = {key_columns + (panel + p) * COLUMNS * dim};
    Tile<R, P> product;
    product.clear();
    product.multiply(queries, MAX_HEAD_DIM, columns, dim);
    product.write(scores + panel * COLUMNS, BLOCK);
  });
  for (int r = 0; r < R; ++r) {
    // the row itself sees [from, to), perhaps nothing of this block
    const int64_t from = shape.first_seen(positions[r]) - block.first, to = positions[r] + 1 - block.first;
    for (int64_t i = begin; i < from && i < padded; ++i) scores[r * BLOCK + i] = HIDDEN;
    for (int64_t i = to > begin ? to : begin; i < padded; ++i) scores[r * BLOCK + i] = HIDDEN;
  }
  float* partials = item.partials + row * size;
  weigh<R>(scores, BLOCK, begin, padded, partials + dim, size, shrink);
  for_panels<R>(0, dim / COLUMNS, [&](auto panels, int64_t panel) __attribute__((always_inline)) {
    constexpr int P = decltype(panels)::value;
    Tile<R, P> product;
    product.read(partials + panel * COLUMNS, size);
    for (int p = 0; p < P; ++p)
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) product.sums[p][r][v] *= shrink[r];
    for (int64_t at = begin, run; at < end; at += run) {
      run = block.run(at, end, shape.token_stride());
      const float* values = item.values + block.places[at / COLUMNS];
      Floats columns[P];
      for (int p = 0; p < P; ++p) columns[p] = {values + (panel + p) * COLUMNS, shape.token_stride()};
      product.multiply(scores + at, BLOCK, columns, run);
    }
    product.write(partials + panel * COLUMNS, size);
  });
}

// One split for the item's KV head and those after it, kv_heads in all: block by block, so that memory is read in order.
static void attend_split(const Item& item, int64_t kv_heads, int64_t split) {
  alignas(64) float key_columns[MAX_HEAD_DIM * BLOCK];
  const Shape& shape = item.shape;
  const int64_t dim = shape.head_dim, rows = item.rows(), size = shape.partial_size();
  for (int64_t r = 0; r < kv_heads * rows; ++r) {
    float* partial = item.partials + r * size;
    for (int64_t i = 0; i < size; ++i) partial[i] = 0.0f;
    partial[dim + COLUMNS] = NOTHING_YET;
  }
  // [first seen by any row, last seen by any row] of this split, whole blocks
  const int64_t first = shape.first_seen(item.first_position), last = item.last();
  const int64_t begin = first > split * SPLIT ? first / BLOCK * BLOCK : split * SPLIT;
  const int64_t end = (split + 1) * SPLIT <= last ? (split + 1) * SPLIT : last + 1;
  for (Block block(item, begin); block.first < end;) {
    const Block next(item, block.first + BLOCK);  // perhaps another split's, of this thread or none
    for (int64_t n = 0; n < kv_heads; ++n) {
      const Item head = item.ahead(n);
      for (int64_t at = 0; at < block.count; at += COLUMNS) {
        if (at < next.count) {
          fetch(head.keys + next.places[at / COLUMNS], shape.token_stride(), dim);
          fetch(head.values + next.places[at / COLUMNS], shape.token_stride(), dim);
        }
        const float* keys = head.keys + block.places[at / COLUMNS];
        transpose(keys, shape.token_stride(), block.count - at, dim, key_columns + at * dim);
      }
      for_tiles(rows, [&](auto tile_rows, int64_t row) __attribute__((always_inline)) {
        attend_block<decltype(tile_rows)::value>(head, row, block, key_columns);
      });
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
  const int64_t dim = shape.head_dim;
  team.share(plan.num_items * kv_heads, [&](int64_t first, int64_t last) {
    for (int64_t i = first, count; i < last; i += count) {
      const int64_t* item = plan.items + i / kv_heads * 2;
      const QueryTile& tile = plan.tiles[item[0]];
      const int64_t kv_head = i % kv_heads, split = item[1], rows = tile.num_queries * group;
      count = kv_heads - kv_head < last - i ? kv_heads - kv_head : last - i;
      if ((split + 1) * SPLIT <= shape.first_seen(tile.first_position)) continue;  // behind every row's window
      // a tile's partials: [splits][kv_heads][rows][size]
      float* partials = plan.partials + (tile.partial_at * heads + (split * kv_heads + kv_head) * rows) * size;
      attend_split({shape, q + tile.first_row * q_stride + kv_head * group * dim, q_stride, scale, keys + kv_head * dim,
                    values + kv_head * dim, plan.tables + tile.table_at, tile.first_position, tile.num_queries, partials},
                   count, split);
    }
  });
  team.share(plan.num_tiles * heads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const QueryTile& tile = plan.tiles[i / heads];
      const int64_t head = i % heads, kv_head = head / group, rows = tile.num_queries * group;
      for (int64_t query = 0; query < tile.num_queries; ++query) {
        const int64_t position = tile.first_position + query, row = query * group + head % group;
        merge(plan.partials + (tile.partial_at * heads + kv_head * rows + row) * size, kv_heads * rows * size,
              shape.first_seen(position) / SPLIT, position / SPLIT, dim,
              out + ((tile.first_row + query) * heads + head) * dim);
      }
    }
  });
}
