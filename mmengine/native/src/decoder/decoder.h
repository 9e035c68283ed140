// All layers of a text decoder: RMS norm, fused q, k and v, a norm (or none) and a rotation of each head of
// q and k, paged attention, SwiGLU or a mixture of experts, residuals. Every token is alone but for attention.
//
// Rounding, where the model is bfloat16, is that of the same steps as separate bfloat16 operations: a norm
// rounds before its weight and after it, a rotation after each product and their sum. A row's result depends
// neither on the other rows nor on the number of threads.
#pragma once

#include "attention/attention.h"
#include "layers/delta.h"
#include "layers/experts.h"
#include "layers/lora.h"
#include "linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// The linear layers of a layer to which adapters may add.
enum { MM_LORA_QKV = 0, MM_LORA_OUT = 1, MM_LORA_GATE_UP = 2, MM_LORA_DOWN = 3, MM_LORA_LINEARS = 4 };

typedef struct {
  const float *input_norm, *post_norm;  // [hidden]
  const float *q_norm, *k_norm;         // [head_dim], or NULL: rotation alone
  mm_linear qkv;                        // n = (num_heads + 2 * num_kv_heads) * head_dim
  mm_linear out;
  mm_linear gate_up;  // packed with a half
  mm_linear down;
  const mm_experts* experts;  // in place of gate_up and down, or NULL
  const mm_delta* delta;  // NULL, or the mixer in place of attention: then qkv gives what mm_delta_mix takes
} mm_decoder_layer;

typedef struct {
  int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads;
  int32_t head_dim;  // a multiple of 8 up to 256
  int32_t dtype;     // of hidden states and linears: MM_FP32 or MM_BF16
  float eps;
  const float* norm;  // [hidden], behind the last layer
  const mm_decoder_layer* layers;
  int32_t rotary_dim;  // values of a head that are rotated, its first ones; 0: all
  int32_t gated;       // whether qkv has num_heads more heads, the gates of what attention gives
  int32_t norm_once;   // bfloat16 norms round behind their weight alone
  mm_delta_sizes delta;
} mm_decoder;

// A step of t tokens; matrices without gaps, of the decoder's dtype unless said otherwise.
typedef struct {
  int32_t num_tokens, num_deepstack;
  const void* embeds;      // [t, hidden]
  const void* deepstack;   // [num_deepstack, t, hidden]: added behind the first layers
  const float *cos, *sin;  // [t, half of what is rotated], rounded to the decoder's dtype
  void* hidden;            // [t, hidden]: the result
  void* qkv;               // [t, heads and twice kv heads, head_dim]: scratch; rotated q and k, v, and gates
  void* mixed;             // [t, num_heads, head_dim]: scratch
  void* normed;            // [t, hidden]: scratch
  void* product;           // [t, intermediate]: scratch
  void* aux_rows;  // [t, num_aux_layers * hidden]: what enters the layers of `aux_hidden_states`, one beside the other
  int64_t aux_stride;  // elements between rows of `aux_rows`
  const int32_t* aux_hidden_states;  // [num_aux_layers]: layers, num_layers for what enters the final norm
  int32_t num_aux_layers;  // 0: nothing is kept
  const mm_state_step* states;  // where a layer has a delta
  const mm_lora_step* lora;  // adapters, MM_LORA_LINEARS a layer, or NULL
} mm_decoder_step;

// All layers and the final norm. kv_layers [num_layers]: each layer's part of the pool. Gives 0, or 1 where
// memory for a linear or for attention could not be had.
int32_t mm_decoder_forward(const mm_decoder* decoder, const mm_decoder_step* step, const mm_attention_step* attention,
                           void* const* kv_layers);

// One layer in two halves, for any other attention: up to q, k and v in step->qkv, and from attention's output on.
// They give what mm_decoder_forward gives.
int32_t mm_decoder_before_attention(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer);
int32_t mm_decoder_after_attention(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer,
                                   const void* mixed, int64_t mixed_stride);

// One layer with a delta, as a whole; `place`: how many such layers stand before it.
int32_t mm_decoder_delta_layer(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer, int32_t place);

// Parts of those halves: q, k and v of `inputs`, normed already and rows input_stride apart; and attention
// over the paged cache from step->qkv to step->mixed. They give what mm_decoder_forward gives.
int32_t mm_decoder_heads(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer, const void* inputs,
                         int64_t input_stride);
int32_t mm_decoder_attend(const mm_decoder* decoder, const mm_decoder_step* step, const mm_attention_step* attention,
                          void* kv_layer);

// Where time goes: nanoseconds of mm_decoder_forward are added to ns[0] for linears, ns[1] for attention and
// ns[2] for everything else. NULL, as at first, measures nothing. One for the process.
void mm_profile(int64_t* ns);

// Norms step->hidden in place, after the last layer.
void mm_decoder_final_norm(const mm_decoder* decoder, const mm_decoder_step* step);

#ifdef __cplusplus
}
#endif
