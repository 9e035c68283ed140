// An EAGLE-3 head: a decoder whose first layer reads the next token's embedding beside the hidden state, and
// a chain of drafts, each fed to the next pass. Rounding and independence of rows are those of decoder/decoder.h.
#pragma once

#include "decoder/decoder.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  mm_decoder decoder;  // its first layer's qkv reads [embed_size + hidden]; input norms behind the first layer
  int32_t embed_size, vocab_size, draft_vocab_size;
  int32_t norm_before_residual, norm_output;
  int32_t num_aux_layers, aux_size;
  int32_t num_fc_norms;         // 0, 1 over all aux_hidden_states together, or num_aux_layers
  const float* fc_norms;        // [num_aux_layers * aux_size] where there are any
  const float* embed_norm;      // [embed_size]
  const float* hidden_norm;     // [hidden]
  mm_linear fc;                 // num_aux_layers * aux_size to hidden
  mm_linear scores;             // hidden to draft_vocab_size
  const void* embedding;        // [vocab_size, embed_size]
  const int64_t* target_ids;    // [draft_vocab_size], ids of the target; NULL where they are the same
} mm_draft_head;

// A pass of t tokens. In `rows`: num_tokens, cos, sin and scratch; embeds and hidden are the head's business.
typedef struct {
  mm_decoder_step rows;
  const void* hidden;  // [t, hidden]: fused aux_hidden_states, or what the pass before carried
  const void* embeds;  // [t, embed_size]: of the tokens one further on
  void* inputs;        // [t, embed_size + hidden]: scratch
  void* stream;        // [t, hidden]: what enters the final norm
  void* z;             // [t, hidden]: behind it
} mm_draft_pass;

// aux_hidden_states [t, num_aux_layers * aux_size], rows aux_stride apart, to out [t, hidden]; scratch of
// aux_hidden_states' size. This and what follows gives 0, or 1 where memory could not be had.
int32_t mm_draft_fuse(const mm_draft_head* head, const void* aux_hidden_states, int64_t aux_stride, int32_t num_tokens,
                      void* scratch, void* out);

// One pass. kv_layers: of the head's own layers.
int32_t mm_draft_forward(const mm_draft_head* head, mm_draft_pass* pass, const mm_attention_step* attention,
                         void* const* kv_layers);

// The same around any other attention: up to q, k and v of the first layer, and the final norm. In between
// mm_decoder_after_attention of it, and both halves of the others, over head->decoder and pass->rows.
int32_t mm_draft_begin(const mm_draft_head* head, mm_draft_pass* pass);
void mm_draft_end(const mm_draft_head* head, mm_draft_pass* pass);

// n rows, those that may draft most first. What a row drafts at i stands at its slot of kv_lens + i.
typedef struct {
  int32_t num_rows, max_drafts;
  const int32_t* most;       // [n], descending, at least 1: drafts of a row
  const int32_t* kv_lens;    // [n] tokens of each row in the cache
  const int32_t* positions;  // [n] where the first token behind them stands
  const int32_t* block_table;
  int32_t table_stride, block_size;
  const float *table_cos, *table_sin;  // [beyond the largest position used, head_dim / 2]
  const void* z;                       // [n, hidden]: of the last token of each row
  void* carry;                         // [n, hidden]: what it carries; written over
  float* logits;                       // [n, draft_vocab_size]: scratch
  // [max_drafts, n]: drafts[i] holds those at i, of rows that have so many; what is not negative is given, and
  // stays.
  int64_t* drafts;
  void* embeds;                        // [n, embed_size]: scratch
  float *cos, *sin;                    // [n, head_dim / 2]: scratch
  int32_t* lens;                       // [2 * n + 1]: scratch
  int64_t* slots;                      // [n]: scratch
} mm_draft_chain;

// Greedy drafts where none are given: the best token of z, then a pass for each further one. pass->rows and pass:
// scratch alone.
int32_t mm_draft_run_chain(const mm_draft_head* head, const mm_draft_chain* chain, mm_draft_pass* pass,
                           void* const* kv_layers);

#ifdef __cplusplus
}
#endif
