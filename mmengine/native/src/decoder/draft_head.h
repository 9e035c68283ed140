// An EAGLE-3 head: a decoder whose first layer reads the next token's embedding besides the hidden state. A chain
// drafts several tokens; each draft is the input of the next pass. Rounding and independence of rows are as in
// decoder/decoder.h.
#pragma once

#include "decoder/decoder.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  mm_decoder decoder;  // its first layer's qkv reads [embed_size + hidden]; later layers have ordinary input norms
  int32_t embed_size, vocab_size, draft_vocab_size;
  int32_t norm_before_residual, norm_output;
  int32_t num_aux_layers, aux_size;
  int32_t num_fc_norms;         // 0, 1 (one norm over all auxiliary states), or num_aux_layers (one norm for each)
  const float* fc_norms;        // [num_aux_layers * aux_size], if any
  const float* embed_norm;      // [embed_size]
  const float* hidden_norm;     // [hidden]
  mm_linear fc;                 // num_aux_layers * aux_size to hidden
  mm_linear scores;             // hidden to draft_vocab_size
  const void* embedding;        // [vocab_size, embed_size]
  const int64_t* target_ids;    // [draft_vocab_size]: the target's token ids; NULL if the ids are the same
} mm_draft_head;

// A pass of t tokens. `rows` provides num_tokens, cos, sin and scratch; the head sets embeds and hidden.
typedef struct {
  mm_decoder_step rows;
  const void* hidden;  // [t, hidden]: fused aux_hidden_states, or the previous pass's carry
  const void* embeds;  // [t, embed_size]: embeddings of the next tokens
  void* inputs;        // scratch: [t, embed_size + hidden]
  void* stream;        // [t, hidden]: the input of the final norm
  void* z;             // [t, hidden]: the output of the final norm
} mm_draft_pass;

// Projects aux_hidden_states [t, num_aux_layers * aux_size], with stride aux_stride, to out [t, hidden]; scratch has
// the size of aux_hidden_states. This and the following functions return 0, or 1 if memory cannot be allocated.
int32_t mm_draft_fuse(const mm_draft_head* head, const void* aux_hidden_states, int64_t aux_stride, int32_t num_tokens,
                      void* scratch, void* out);

// Runs one pass. kv_layers: the KV pool of each of the head's layers.
int32_t mm_draft_forward(const mm_draft_head* head, mm_draft_pass* pass, const mm_attention_step* attention,
                         void* const* kv_layers);

// The parts of a pass for a caller that computes attention itself. mm_draft_begin runs up to q, k and v of the first
// layer, and mm_draft_end applies the final norm. In between, with head->decoder and pass->rows, call
// mm_decoder_after_attention for the first layer, and mm_decoder_before_attention and mm_decoder_after_attention for
// each further layer.
int32_t mm_draft_begin(const mm_draft_head* head, mm_draft_pass* pass);
void mm_draft_end(const mm_draft_head* head, mm_draft_pass* pass);

// A chain of drafts for n rows, sorted by descending `most`. The KV of a row's draft i has the index kv_lens + i in the
// row.
typedef struct {
  int32_t num_rows, max_drafts;
  const int32_t* most;       // [n], descending, at least 1: drafts per row
  const int32_t* kv_lens;    // [n] tokens of each row in the cache
  const int32_t* positions;  // [n] position of the first token after kv_lens
  const int32_t* block_table;
  int32_t table_stride, block_size;
  const float *table_cos, *table_sin;  // [more than the largest position used, head_dim / 2]
  const void* z;                       // [n, hidden]: the final norm's output for each row's last token
  void* carry;                         // [n, hidden]: the hidden state that the next pass reads; overwritten
  float* logits;                       // scratch: [n, draft_vocab_size]
  // [max_drafts, n]: drafts[i] has draft i of each row with more than i drafts. Entries that are not negative before
  // the call are used as drafts and are not changed.
  int64_t* drafts;
  void* embeds;                        // scratch: [n, embed_size]
  float *cos, *sin;                    // scratch: [n, head_dim / 2]
  int32_t* lens;                       // scratch: [2 * n + 1]
  int64_t* slots;                      // scratch: [n]
} mm_draft_chain;

// Replaces each negative entry of `drafts` by the token with the highest score. The first draft's scores come from z,
// and each further draft's scores from one pass. `pass` is only scratch.
int32_t mm_draft_run_chain(const mm_draft_head* head, const mm_draft_chain* chain, mm_draft_pass* pass,
                           void* const* kv_layers);

#ifdef __cplusplus
}
#endif
