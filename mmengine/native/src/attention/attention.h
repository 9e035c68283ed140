// Paged attention that reads the KV pool in place, without gathering, and never reads past a row's last token.
//
// A layer of the pool is [num_blocks, 2, block_size, num_kv_heads, head_dim], K at 0 and V at 1 of the second axis. A
// row's result depends neither on the step's other rows nor on the number of threads. If a row's queries are a token
// and up to 15 drafts after it, each gets the same bits as in a step of its own. With tiles_only, this holds for any
// queries of a row. Keys that no query of the row sees are not read.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One step of n rows with t tokens in total; each row's tokens are consecutive. All arrays must outlive the step's
// calls.
typedef struct {
  int32_t num_rows, num_tokens;
  int32_t table_stride;  // elements between rows of block_table
  int32_t block_size;  // a power of two
  int32_t num_heads, num_kv_heads, head_dim;  // head_dim: a multiple of 8, at most 512
  int32_t dtype;  // of q, k, v, the pool and the result: 0 float32, 1 bfloat16
  int32_t tiles_only;  // 1: all rows use tiles, so that a token's bits do not depend on its chunk's size
  const int32_t* query_starts;  // [n + 1] index of each row's first token, then t
  const int32_t* kv_lens;  // [n] tokens that each row has after this step
  const int32_t* num_drafts;  // [n] how many of a row's last queries are drafts; NULL: no drafts
  const int32_t* block_table;  // [n, table_stride]; only blocks within kv_lens are read
  const int64_t* slots;  // [t] block * block_size + offset
} mm_attention_step;

// Which keys a layer's queries see, and how scores are computed. `query` and `key` are positions in the row.
typedef struct {
  int32_t window;  // a query sees only keys > query - window; 0: no window
  int32_t chunk;  // a query sees only keys with key / chunk == query / chunk; 0: no chunks
  int32_t value_dim;  // size of a V head, which the pool pads with zeros to head_dim; 0: head_dim
  float scale;  // positive, multiplies scores; 0: head_dim ** -0.5
  float softcap;  // a scaled score becomes softcap * tanh(score / softcap); 0: unchanged
} mm_attention_layer;

// Stores k and v [t, num_kv_heads, head_dim] at the step's slots. Strides are in elements between tokens.
void mm_attention_append(const mm_attention_step* step, void* kv_layer, const void* k, int64_t k_stride, const void* v,
                         int64_t v_stride);

// Computes causal attention. A row's queries are its last tokens. q and out are [t, num_heads, head_dim], with strides
// in elements between tokens. Scores are scaled by head_dim ** -0.5. Returns 0, or 1 if scratch memory cannot be
// allocated.
int32_t mm_attention_run(const mm_attention_step* step, const void* kv_layer, const void* q, int64_t q_stride,
                         void* out, int64_t out_stride);

// Like mm_attention_run, with the rules in `layer`. The result's values from value_dim on are 0. `sinks` [num_heads]:
// an extra score per head in the softmax, without a value; NULL: none.
int32_t mm_attention_run_layer(const mm_attention_step* step, const mm_attention_layer* layer, const float* sinks,
                               const void* kv_layer, const void* q, int64_t q_stride, void* out, int64_t out_stride);

#ifdef __cplusplus
}
#endif
