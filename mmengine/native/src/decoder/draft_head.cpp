#include "decoder/draft_head.h"

#include <cstring>

#include "decoder/rows.h"
#include "sampling/row.h"

namespace {

using mm::Rows;

int bytes_of(const mm_draft_head* head) { return head->decoder.dtype == MM_BF16 ? 2 : 4; }

Rows rows_of(const mm_draft_head* head, const void* data, int64_t stride, int count) {
  return {const_cast<void*>(data), stride, count, head->decoder.dtype};
}

// Returns the index of the first largest of n values; 0 if all values are NaN.
int64_t best_of(const float* values, int n) {
  mm::f16v most = mm::splat(mm::NEVER);
  int i = 0;
  for (; i + 16 <= n; i += 16) most = mm::larger(mm::load_as<mm::f16v>(values + i), most);
  float largest = mm::largest_lane(most);
  for (; i < n; ++i) largest = values[i] > largest ? values[i] : largest;
  for (int64_t at = 0; at < n; ++at)
    if (values[at] == largest) return at;
  return 0;
}

// For each of the first `active` rows: chooses the given draft, or else the best token for z, and stores the token and
// its embedding.
int32_t choose(const mm_draft_head* head, const mm_draft_chain* chain, const void* z, int active, int64_t* drafts) {
  const int n = head->draft_vocab_size, hidden = head->decoder.hidden_size;
  int is_open = 0;
  for (int row = 0; row < active; ++row) is_open |= drafts[row] < 0;
  if (is_open && mm_linear_run(&head->scores, z, hidden, active, chain->logits, n, 1, nullptr)) return 1;
  const int64_t bytes = (int64_t)head->embed_size * bytes_of(head);
  for (int row = 0; row < active; ++row) {
    if (drafts[row] < 0) {
      const int64_t best = best_of(chain->logits + (int64_t)row * n, n);
      drafts[row] = head->target_ids ? head->target_ids[best] : best;
    }
    memcpy((char*)chain->embeds + row * bytes, (const char*)head->embedding + drafts[row] * bytes, bytes);
  }
  return 0;
}

// Returns the attention step for one new token in each of the first `active` rows, after `ahead` earlier drafts.
mm_attention_step place(const mm_draft_head* head, const mm_draft_chain* chain, int ahead, int active) {
  const int size = chain->block_size, half = head->decoder.head_dim / 2;
  int32_t *starts = chain->lens, *lens = chain->lens + chain->num_rows + 1;
  for (int row = 0; row < active; ++row) {
    const int32_t at = chain->kv_lens[row] + ahead;
    const int64_t block = chain->block_table[(int64_t)row * chain->table_stride + at / size];
    starts[row] = row;
    lens[row] = at + 1;
    chain->slots[row] = block * size + at % size;
    const int64_t angles = (int64_t)(chain->positions[row] + ahead) * half;
    memcpy(chain->cos + (int64_t)row * half, chain->table_cos + angles, half * sizeof(float));
    memcpy(chain->sin + (int64_t)row * half, chain->table_sin + angles, half * sizeof(float));
  }
  starts[active] = active;
  const mm_decoder& d = head->decoder;
  return {
      active, active,  chain->table_stride, size,        d.num_heads, d.num_kv_heads, d.head_dim, d.dtype, 0, starts,
      lens,   nullptr, chain->block_table,  chain->slots};
}

}  // namespace

extern "C" {

int32_t mm_draft_fuse(const mm_draft_head* head, const void* aux_hidden_states, int64_t aux_stride, int32_t num_tokens,
                      void* scratch, void* out) {
  const int64_t wide = (int64_t)head->num_aux_layers * head->aux_size;
  const int parts = head->num_fc_norms, size = parts ? (int)(wide / parts) : 0;
  for (int part = 0; part < parts; ++part) {
    const int64_t at = (int64_t)part * size * bytes_of(head);
    mm::rms_norm_rows(rows_of(head, (const char*)aux_hidden_states + at, aux_stride, num_tokens),
                      head->fc_norms + (int64_t)part * size, size, head->decoder.eps,
                      rows_of(head, (char*)scratch + at, wide, num_tokens));
  }
  return mm_linear_run(&head->fc, parts ? scratch : aux_hidden_states, parts ? wide : aux_stride, num_tokens, out,
                       head->decoder.hidden_size, 0, nullptr);
}

int32_t mm_draft_begin(const mm_draft_head* head, mm_draft_pass* pass) {
  const mm_decoder& d = head->decoder;
  const int t = pass->rows.num_tokens, hidden = d.hidden_size;
  const int64_t wide = head->embed_size + hidden;
  char* states = (char*)pass->inputs + (int64_t)head->embed_size * bytes_of(head);
  mm::rms_norm_rows(rows_of(head, pass->embeds, head->embed_size, t), head->embed_norm, head->embed_size, d.eps,
                    rows_of(head, pass->inputs, wide, t));
  const Rows normed = rows_of(head, pass->rows.normed, hidden, t);
  mm::rms_norm_rows(rows_of(head, pass->hidden, hidden, t), head->hidden_norm, hidden, d.eps, normed);
  mm::copy_rows(normed, hidden, rows_of(head, states, wide, t));
  pass->rows.embeds = head->norm_before_residual ? pass->rows.normed : pass->hidden;
  pass->rows.hidden = pass->stream;
  return mm_decoder_heads(&d, &pass->rows, 0, pass->inputs, wide);
}

void mm_draft_end(const mm_draft_head* head, mm_draft_pass* pass) {
  const mm_decoder& d = head->decoder;
  const int t = pass->rows.num_tokens, hidden = d.hidden_size;
  mm::rms_norm_rows(rows_of(head, pass->stream, hidden, t), d.norm, hidden, d.eps, rows_of(head, pass->z, hidden, t));
}

int32_t mm_draft_forward(const mm_draft_head* head, mm_draft_pass* pass, const mm_attention_step* attention,
                         void* const* kv_layers) {
  if (mm_draft_begin(head, pass)) return 1;
  for (int32_t layer = 0; layer < head->decoder.num_layers; ++layer) {
    if (layer && mm_decoder_before_attention(&head->decoder, &pass->rows, layer)) return 1;
    if (mm_decoder_attend(&head->decoder, &pass->rows, attention, kv_layers[layer])) return 1;
    const int64_t mixed = (int64_t)head->decoder.num_heads * head->decoder.head_dim;
    if (mm_decoder_after_attention(&head->decoder, &pass->rows, layer, pass->rows.mixed, mixed)) return 1;
  }
  mm_draft_end(head, pass);
  return 0;
}

int32_t mm_draft_run_chain(const mm_draft_head* head, const mm_draft_chain* chain, mm_draft_pass* pass,
                           void* const* kv_layers) {
  const void* z = chain->z;
  const int64_t row_bytes = (int64_t)head->decoder.hidden_size * bytes_of(head);
  int active = chain->num_rows;
  for (int i = 0;; ++i) {
    if (choose(head, chain, z, active, chain->drafts + (int64_t)i * chain->num_rows)) return 1;
    while (active && chain->most[active - 1] <= i + 1) --active;
    if (!active) return 0;
    const mm_attention_step attention = place(head, chain, i, active);
    pass->rows.num_tokens = active;
    pass->rows.cos = chain->cos;
    pass->rows.sin = chain->sin;
    pass->hidden = chain->carry;
    pass->embeds = chain->embeds;
    if (mm_draft_forward(head, pass, &attention, kv_layers)) return 1;
    z = pass->z;
    memcpy(chain->carry, head->norm_output ? pass->z : pass->stream, active * row_bytes);
  }
}

}  // extern "C"
