// The layers of a decoder, composed of linears, row functions and attention.
#include "decoder/decoder.h"

#include <chrono>

#include "decoder/rows.h"

namespace {

using mm::Rows;

enum Part { kLinears, kAttention, kRows };
int64_t* profile = nullptr;

// Adds the lifetime of the object, in nanoseconds, to an entry in the profile.
class Timed {
 public:
  explicit Timed(Part part) : to_(profile ? profile + part : nullptr), start_(to_ ? now() : 0) {}
  ~Timed() {
    if (to_) *to_ += now() - start_;
  }

 private:
  static int64_t now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }
  int64_t* to_;
  int64_t start_;
};

template <class... Values>
int32_t linear(Values... values) {
  Timed timed(kLinears);
  return mm_linear_run(values...);
}

template <class... Values>
int32_t gate_up(Values... values) {
  Timed timed(kLinears);
  return mm_linear_gate_up(values...);
}

// Adds the adapters' contribution to a linear layer of `layer`.
int32_t adapt(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer, int32_t linear, const void* x,
              int64_t x_stride, void* y, int64_t y_stride) {
  if (!step->lora) return 0;
  Timed timed(kLinears);
  return mm_lora_add(step->lora, layer * MM_LORA_LINEARS + linear, x, x_stride, y, y_stride, decoder->dtype);
}

// Writes silu(gate) * up to step->product, computed from step->normed. Includes the adapters' contribution.
int32_t swiglu(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer) {
  const int64_t hidden = decoder->hidden_size;
  const mm_linear& linear = decoder->layers[layer].gate_up;
  const int32_t which = layer * MM_LORA_LINEARS + MM_LORA_GATE_UP;
  const float* added = nullptr;
  if (step->lora && mm_lora_touches(step->lora, which)) {
    Timed timed(kLinears);
    added = mm_lora_sums(step->lora, which, step->normed, hidden, step->num_tokens, linear.n);
    if (!added) return 1;
  }
  return gate_up(&linear, (const void*)step->normed, hidden, step->num_tokens, step->product,
                 (int64_t)decoder->intermediate_size, added);
}

Rows rows_of(const mm_decoder* decoder, const mm_decoder_step* step, const void* data, int64_t stride) {
  return {const_cast<void*>(data), stride, step->num_tokens, decoder->dtype};
}

void norm(const mm_decoder* decoder, const mm_decoder_step* step, const void* x, const float* weight, void* out) {
  Timed timed(kRows);
  int size = decoder->hidden_size;
  mm::rms_norm_rows(rows_of(decoder, step, x, size), weight, size, decoder->eps, rows_of(decoder, step, out, size),
                    decoder->norm_once);
}

// Returns the input of `layer`, or of the final norm for num_layers.
const void* residual(const mm_decoder_step* step, int32_t layer) { return layer ? step->hidden : step->embeds; }

void record_aux(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer) {
  const int size = decoder->hidden_size;
  for (int32_t i = 0; i < step->num_aux_layers; ++i) {
    if (step->aux_hidden_states[i] != layer) continue;
    Timed timed(kRows);
    char* to = (char*)step->aux_rows + (int64_t)i * size * (decoder->dtype == MM_BF16 ? 2 : 4);
    mm::copy_rows(rows_of(decoder, step, residual(step, layer), size), size,
                  rows_of(decoder, step, to, step->aux_stride));
  }
}

int64_t qkv_size(const mm_decoder* decoder) {
  const int gates = decoder->gated ? decoder->num_heads : 0;
  return (int64_t)(decoder->num_heads + 2 * decoder->num_kv_heads + gates) * decoder->head_dim;
}

}  // namespace

extern "C" {

void mm_profile(int64_t* ns) { profile = ns; }

int32_t mm_decoder_before_attention(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer) {
  record_aux(decoder, step, layer);
  norm(decoder, step, residual(step, layer), decoder->layers[layer].input_norm, step->normed);
  return mm_decoder_heads(decoder, step, layer, step->normed, decoder->hidden_size);
}

int32_t mm_decoder_heads(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer, const void* inputs,
                         int64_t input_stride) {
  const mm_decoder_layer& weights = decoder->layers[layer];
  int64_t size = qkv_size(decoder);
  if (linear(&weights.qkv, inputs, input_stride, step->num_tokens, step->qkv, size, 0, nullptr)) return 1;
  if (adapt(decoder, step, layer, MM_LORA_QKV, inputs, input_stride, step->qkv, size)) return 1;
  Timed timed(kRows);
  mm::norm_and_rotate(rows_of(decoder, step, step->qkv, size),
                      {weights.q_norm, weights.k_norm, decoder->eps, step->cos, step->sin, decoder->num_heads,
                       decoder->num_kv_heads, decoder->head_dim, decoder->rotary_dim, decoder->norm_once != 0});
  return 0;
}

int32_t mm_decoder_after_attention(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer,
                                   const void* mixed, int64_t mixed_stride) {
  const mm_decoder_layer& weights = decoder->layers[layer];
  int64_t hidden = decoder->hidden_size, wide = decoder->intermediate_size;
  int m = step->num_tokens;
  if (decoder->gated && !weights.delta) {
    Timed timed(kRows);
    const int heads = decoder->num_heads * decoder->head_dim;
    const int64_t before = qkv_size(decoder) - heads;
    const char* gates = (const char*)step->qkv + before * (decoder->dtype == MM_BF16 ? 2 : 4);
    mm::gate_rows(rows_of(decoder, step, mixed, mixed_stride), rows_of(decoder, step, gates, qkv_size(decoder)), heads,
                  rows_of(decoder, step, step->mixed, heads));
    mixed = step->mixed, mixed_stride = heads;
  }
  if (linear(&weights.out, mixed, mixed_stride, m, step->hidden, hidden, 0, residual(step, layer))) return 1;
  if (adapt(decoder, step, layer, MM_LORA_OUT, mixed, mixed_stride, step->hidden, hidden)) return 1;
  norm(decoder, step, step->hidden, weights.post_norm, step->normed);
  if (weights.experts) {
    Timed timed(kLinears);
    if (mm_experts_run(weights.experts, step->normed, hidden, m, step->hidden, hidden, step->hidden)) return 1;
  } else {
    if (swiglu(decoder, step, layer)) return 1;
    if (linear(&weights.down, step->product, wide, m, step->hidden, hidden, 0, step->hidden)) return 1;
    if (adapt(decoder, step, layer, MM_LORA_DOWN, step->product, wide, step->hidden, hidden)) return 1;
  }
  if (layer < step->num_deepstack) {
    Timed timed(kRows);
    int64_t bytes = (int64_t)m * hidden * (decoder->dtype == MM_BF16 ? 2 : 4);
    mm::add_rows(rows_of(decoder, step, step->hidden, hidden), (const char*)step->deepstack + layer * bytes,
                 (int)hidden);
  }
  return 0;
}

int32_t mm_decoder_delta_layer(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer, int32_t place) {
  const mm_decoder_layer& weights = decoder->layers[layer];
  const int hidden = decoder->hidden_size, m = step->num_tokens;
  const int64_t values = (int64_t)decoder->delta.num_heads * decoder->delta.value_dim;
  record_aux(decoder, step, layer);
  norm(decoder, step, residual(step, layer), weights.input_norm, step->normed);
  if (linear(&weights.qkv, step->normed, (int64_t)hidden, m, step->qkv, (int64_t)weights.qkv.n, 0, nullptr)) return 1;
  if (adapt(decoder, step, layer, MM_LORA_QKV, step->normed, hidden, step->qkv, weights.qkv.n)) return 1;
  const mm_linear& ba = weights.delta->ba;
  if (linear(&ba, step->normed, (int64_t)hidden, m, step->states->ba, (int64_t)ba.n, 0, nullptr)) return 1;
  {
    Timed timed(kAttention);
    mm_delta_mix(&decoder->delta, weights.delta, step->states, place, step->qkv, decoder->dtype, decoder->eps,
                 step->mixed);
  }
  return mm_decoder_after_attention(decoder, step, layer, step->mixed, values);
}

void mm_decoder_final_norm(const mm_decoder* decoder, const mm_decoder_step* step) {
  record_aux(decoder, step, decoder->num_layers);
  norm(decoder, step, residual(step, decoder->num_layers), decoder->norm, step->hidden);
}

int32_t mm_decoder_attend(const mm_decoder* decoder, const mm_decoder_step* step, const mm_attention_step* attention,
                          void* kv_layer) {
  const int64_t size = qkv_size(decoder), mixed = (int64_t)decoder->num_heads * decoder->head_dim;
  const int64_t kv_size = (int64_t)decoder->num_kv_heads * decoder->head_dim;
  const char* q = (const char*)step->qkv;
  const int bytes = decoder->dtype == MM_BF16 ? 2 : 4;
  const char *k = q + mixed * bytes, *v = k + kv_size * bytes;
  Timed timed(kAttention);
  mm_attention_append(attention, kv_layer, k, size, v, size);
  return mm_attention_run(attention, kv_layer, q, size, step->mixed, mixed);
}

int32_t mm_decoder_forward(const mm_decoder* decoder, const mm_decoder_step* step, const mm_attention_step* attention,
                           void* const* kv_layers) {
  const int64_t mixed = (int64_t)decoder->num_heads * decoder->head_dim;
  int32_t with_kv = 0;
  for (int32_t layer = 0; layer < decoder->num_layers; ++layer) {
    if (decoder->layers[layer].delta) {
      if (mm_decoder_delta_layer(decoder, step, layer, layer - with_kv)) return 1;
      continue;
    }
    if (mm_decoder_before_attention(decoder, step, layer)) return 1;
    if (mm_decoder_attend(decoder, step, attention, kv_layers[with_kv++])) return 1;
    if (mm_decoder_after_attention(decoder, step, layer, step->mixed, mixed)) return 1;
  }
  mm_decoder_final_norm(decoder, step);
  return 0;
}

}  // extern "C"
