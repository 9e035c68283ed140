// What the kernels of paged attention share: a call, and where its keys and values lie.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "attention/softmax.h"

namespace mm {

struct AttentionCall {
  const mm_attention_step* step;
  const void* kv;
  const void* q;
  int64_t q_stride;
  void* out;
  int64_t out_stride;

  int group() const { return step->num_heads / step->num_kv_heads; }  // heads that share a KV head
  int first_position(int row) const {                                 // of the row's first query
    return step->kv_lens[row] - (step->query_starts[row + 1] - step->query_starts[row]);
  }
};

// Queries [query0, query1) of a row, counted from its first one, for KV heads [head0, head1).
struct AttentionTask {
  int row, query0, query1, head0, head1;
};

// Where a token's K of KV head 0 stands in its layer, in elements; its V is `v_offset` further.
struct Places {
  int shift, mask;        // of the block size
  int64_t token;          // from one token of a block to the next
  int64_t v_offset;
  const int32_t* blocks;  // of the row

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

// A row with one query or few, all of them in the task: K and V are streamed from memory once for all its heads.
int64_t decode_scratch_bytes(const mm_attention_step& step, int queries);
void attention_decode(const AttentionCall& call, const AttentionTask& task, void* scratch);

// Many queries of one row: K and V are packed a block at a time, and all queries of the task pass over it.
int64_t prefill_scratch_bytes(const mm_attention_step& step, int queries);
void attention_prefill(const AttentionCall& call, const AttentionTask& task, void* scratch);

}  // namespace mm
