// Shared by the paged attention kernels: a call, and the location of its keys and values.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/attention.h"
#include "attention/softmax.h"

namespace mm {

// A layer's rules, with the defaults filled in.
struct AttentionRules {
  int window, chunk, value_dim;
  Scoring scoring;
  const float* sinks;  // [num_heads], or NULL

  AttentionRules(const mm_attention_step& step, const mm_attention_layer& layer, const float* sinks)
      : window(layer.window),
        chunk(layer.chunk),
        value_dim(layer.value_dim ? (int)round_up(layer.value_dim, 8) : step.head_dim),
        scoring{layer.scale ? layer.scale : 1.0f / std::sqrt((float)step.head_dim), layer.softcap},
        sinks(sinks) {}

  // Returns the first key that a query at `position` sees. The result never decreases with the position.
  int first_key(int position) const {
    int first = window && position >= window ? position - window + 1 : 0;
    if (chunk && position / chunk * chunk > first) first = position / chunk * chunk;
    return first;
  }
};

struct AttentionCall {
  const mm_attention_step* step;
  AttentionRules rules;
  const void* kv;
  const void* q;
  int64_t q_stride;
  void* out;
  int64_t out_stride;

  int group() const { return step->num_heads / step->num_kv_heads; }  // heads that share a KV head
  int first_position(int row) const {                                 // position of the row's first query
    return step->kv_lens[row] - (step->query_starts[row + 1] - step->query_starts[row]);
  }
};

// Queries [query0, query1) of a row, counted from the row's first query in this step, for KV heads [head0, head1).
struct AttentionTask {
  int row, query0, query1, head0, head1;
};

// The location of a row's K and V. `of` returns the element offset of a position's K for KV head 0 of the layer. V is
// `v_offset` elements further.
struct Places {
  int shift, mask;        // divide a position by the block size
  int64_t token;          // distance between tokens of a block
  int64_t v_offset;
  const int32_t* blocks;  // the row's blocks

  Places(const mm_attention_step& step, int row)
      : shift(__builtin_ctz(step.block_size)),
        mask(step.block_size - 1),
        token((int64_t)step.num_kv_heads * step.head_dim),
        v_offset(token * step.block_size),
        blocks(step.block_table + (int64_t)row * step.table_stride) {}

  int64_t of(int position) const {
    return (int64_t)blocks[position >> shift] * 2 * v_offset + (position & mask) * token;
  }
};

// For a row with few queries. A task has all of them, and reads the K and V of its KV heads from memory once.
int64_t decode_scratch_bytes(const AttentionCall& call, int queries);
void attention_decode(const AttentionCall& call, const AttentionTask& task, void* scratch);

// For many queries of a row. K and V are packed block by block, and each packed block serves all queries of the task.
int64_t prefill_scratch_bytes(const AttentionCall& call, int queries);
void attention_prefill(const AttentionCall& call, const AttentionTask& task, void* scratch);

}  // namespace mm
