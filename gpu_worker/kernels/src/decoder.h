// A whole step of the Llama family: token ids in, logits out, one team from end to end.
//
//   embed ▸ [ norm ▸ qkv ▸ rope, KV write ▸ attend ▸ output ▸ norm ▸ swiglu ▸ down ] × layers ▸ norm ▸ head ▸ largest
//
// The two matrices that end in the residual stream x add to it in place.
#pragma once

#include "attention.h"
#include "largest.h"
#include "linear.h"

// The structs mirror those of gpu_worker/kernels/structs.py, field by field.
struct Layer {
  const float *attention_norm, *mlp_norm;  // [hidden]
  const float *q_norm, *k_norm;            // [head_dim], or null
  Linear qkv, output, gate, up, down;
  int64_t window;          // 0: all
  float *keys, *values;    // [pages, page_size, kv_heads, head_dim]
};

struct Model {
  const Layer* layers;
  int64_t num_layers, hidden, heads, kv_heads, head_dim, page_size;
  double eps;
  const float* norm;  // [hidden]
  Linear head;
  const void* embedding;  // [vocab, hidden]; null: the head's columns
  Stored embedding_stored;
};

// Scratch of a step. x, normed: [rows, hidden]; qkv: [rows, (heads + 2 * kv_heads) * head_dim]; attended: [rows, heads
// * head_dim]; inner: [rows, intermediate]; scratch, rounded: of linear layers,
// [threads][scratch_size(rows)] and as of RoundedRows.
struct Workspace {
  float *x, *normed, *qkv, *attended, *inner, *scratch;
  void* rounded;
};

struct Step {
  int64_t rows;
  const int64_t *token_ids, *positions, *slots;  // [rows]
  const float *cos, *sin;                        // [positions, head_dim / 2]
  AttentionPlan attention;
  const int64_t* logit_rows;  // ascending
  int64_t num_logit_rows;
  float* logits;  // [num_logit_rows, vocab]
  Largest *parts, *largest;  // scratch and result as of largest(), of the logits
  Workspace workspace;
};

// A token's row; of a tied head, one column of a panel.
static inline void embed(const Model& model, int64_t token, float* to) {
  const int64_t panel = token / COLUMNS, column = token % COLUMNS;
  const auto gather = [&](auto stored) {
    const auto columns = source<decltype(stored)::value>(model.head, panel);
    for (int64_t i = 0; i < model.hidden; ++i) to[i] = columns.run(i / RUN * RUN).at(i % RUN, column / LANES)[column % LANES];
  };
  if (const auto* floats = static_cast<const float*>(model.embedding)) {
    if (model.embedding_stored == Stored::FLOAT32)
      memcpy(to, floats + token * model.hidden, model.hidden * sizeof(float));
    else
      for (int64_t i = 0; i < model.hidden; ++i)
        to[i] = widen(static_cast<const uint16_t*>(model.embedding)[token * model.hidden + i]);
    return;
  }
  switch (model.head.stored) {
    case Stored::FLOAT32: return gather(Of<Stored::FLOAT32>{});
    case Stored::BFLOAT16: return gather(Of<Stored::BFLOAT16>{});
    case Stored::INT8: return gather(Of<Stored::INT8>{});
    case Stored::BFLOAT16_PAIRS:
    case Stored::INT8_QUADS:
      for (int64_t i = 0; i < model.hidden; ++i) to[i] = dots_weight(model.head, panel, i, column);
  }
}

// Of the last layer's rows only those whose logits are wanted go on: moved to the front, in order.
static inline void keep_logit_rows(const Step& step, float* rows, int64_t size) {
  for (int64_t i = 0; i < step.num_logit_rows; ++i)
    if (step.logit_rows[i] != i) memcpy(rows + i * size, rows + step.logit_rows[i] * size, size * sizeof(float));
}

static inline void decode_layer(Team& team, const Model& model, const Layer& layer, const Step& step,
                                const LinearScratch& scratch) {
  const Workspace& to = step.workspace;
  const Shape shape{{model.heads, model.kv_heads, model.head_dim}, model.page_size, layer.window};
  const int64_t hidden = model.hidden, row_size = shape.row_size(), attended_size = layer.output.depth;
  const float eps = model.eps;
  int64_t rows = step.rows;
  rms_norm(team, to.x, layer.attention_norm, to.normed, rows, hidden, eps);
  linear<STORE>(team, to.normed, hidden, rows, layer.qkv, to.qkv, row_size, scratch);
  rope_and_write(team, to.qkv, layer.q_norm, layer.k_norm, eps, step.cos, step.sin, step.positions, step.slots,
                 layer.keys, layer.values, rows, shape);
  attend(team, to.qkv, row_size, layer.keys, layer.values, to.attended, step.attention, shape,
         1.0f / __builtin_sqrtf(model.head_dim));
  if (&layer == model.layers + model.num_layers - 1) {
    team.share(1, [&](int64_t, int64_t) {
      keep_logit_rows(step, to.x, hidden);
      keep_logit_rows(step, to.attended, attended_size);
    });
    rows = step.num_logit_rows;
  }
  linear<ADD>(team, to.attended, attended_size, rows, layer.output, to.x, hidden, scratch);
  rms_norm(team, to.x, layer.mlp_norm, to.normed, rows, hidden, eps);
  swiglu(team, to.normed, hidden, rows, layer.gate, layer.up, to.inner, layer.gate.columns, scratch);
  linear<ADD>(team, to.inner, layer.down.depth, rows, layer.down, to.x, hidden, scratch);
}

static inline void decode(Team& team, int64_t thread, const Model& model, const Step& step) {
  const Workspace& to = step.workspace;
  const int64_t hidden = model.hidden, rows = step.num_logit_rows;
  const LinearScratch scratch{to.scratch + thread * scratch_size(step.rows), to.rounded};
  team.share(step.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) embed(model, step.token_ids[row], to.x + row * hidden);
  });
  for (int64_t i = 0; i < model.num_layers; ++i) decode_layer(team, model, model.layers[i], step, scratch);
  rms_norm(team, to.x, model.norm, to.normed, rows, hidden, model.eps);
  linear<STORE>(team, to.normed, hidden, rows, model.head, step.logits, model.head.columns, scratch);
  largest(team, step.logits, rows, model.head.columns, step.parts, step.largest);
}
