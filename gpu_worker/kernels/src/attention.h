// Causal attention over KV pages: blocked, online softmax (https://arxiv.org/abs/2205.14135), nothing gathered.
//
//   positions   0        128       256       384       512                     1024
//               | block  | block   | block   | block   | …                     |
//               | split, an item for any thread        | split                 |
//
// Blocks and splits lie at absolute positions. A query's row goes block by block within a split, then its splits are
// merged in order: the same additions whoever shares its tile, its step or its threads (design §6).
#pragma once

#include "attention_block.h"
#include "team.h"

constexpr int64_t SPLIT = 512;  // positions of one work item; SPLIT_TOKENS in gpu_worker/kernels/library.py
// Of a KV head's partials in a step whose attention may be done twice: decodes. With a chunk of a prompt it is not.
constexpr int64_t BACKUP_FLOATS = RESULT_FLOATS / 8;

// A run of up to a few queries of one sequence, consecutive positions. Mirrors the rows of the `tiles` argument.
struct QueryTile {
  int64_t first_row, num_queries, first_position, table_at, partial_at;
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
  const int64_t at_once = rows <= TILE_ROWS ? HEADS_AT_ONCE : 1;  // KV heads
  bool ends = false;
  for (Block block(item, work.first_block()); !ends;) {
    ends = block.first + BLOCK >= end;
    const Work& next_work = ends && following ? *following : work;
    const Block next(next_work.item, ends && following ? following->first_block() : block.first + BLOCK);
    for (int64_t n = 0; n < kv_heads; n += at_once) {
      const Item head = item.ahead(n);
      const int64_t left = kv_heads - n, heads = left < at_once ? left : at_once;
      const bool stays = left > heads;  // in this block
      const float* keys_after = stays ? head.keys + heads * dim : next_work.item.keys;
      const Block& block_after = stays ? block : next;
      if (rows > TILE_ROWS) {
        const int64_t steps = (block.count + COLUMNS - 1) / COLUMNS;
        Ahead values(shape, head.values, block, steps), keys(shape, keys_after, block_after, steps);
        attend_many(head, block, values, keys);
      } else {
        const float* following = block_after.count > 0 ? keys_after + block_after.places[0] : nullptr;
        with_count<TILE_ROWS>(rows, [&](auto count) __attribute__((always_inline)) {
          attend_few<decltype(count)::value>(head, heads, block, following);
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
    const int64_t most = RESULT_FLOATS / most_floats;  // whole items where there are enough: read in the order of memory
    team.share_with_backup(total, most, kv_heads, compute, [&](int64_t first, int64_t last, float* own) {
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
