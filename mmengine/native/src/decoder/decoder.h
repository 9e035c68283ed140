// All layers of a text decoder: RMS norm, fused q, k and v, an optional norm and a rotation of each head of q and k,
// paged attention, SwiGLU or a mixture of experts, residuals. Tokens interact only in attention and delta nets.
//
// bfloat16 models round after each operation: a norm rounds before and after multiplying by its weight, and a rotation
// rounds each product and their sum. A row's result does not depend on other rows or on the number of threads.
#pragma once

#include "attention/attention.h"
#include "layers/delta.h"
#include "layers/experts.h"
#include "layers/lora.h"
#include "linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// The linear layers of a decoder layer that adapters may add to.
enum { MM_LORA_QKV = 0, MM_LORA_OUT = 1, MM_LORA_GATE_UP = 2, MM_LORA_DOWN = 3, MM_LORA_LINEARS = 4 };

typedef struct {
  const float *input_norm, *post_norm;  // [hidden]
  const float *q_norm, *k_norm;  // [head_dim], or NULL: rotation only
  mm_linear qkv;  // n = (num_heads + 2 * num_kv_heads) * head_dim
  mm_linear out;
  mm_linear gate_up;  // packed with half = n / 2 (linear/linear.h)
  mm_linear down;
  const mm_experts* experts;  // replaces gate_up and down, or NULL
  const mm_delta* delta;  // NULL, or the delta net that replaces attention; qkv's output is then mm_delta_mix's input
} mm_decoder_layer;

typedef struct {
  int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads;
  int32_t head_dim;  // a multiple of 8 up to 256
  int32_t dtype;  // dtype of hidden states and linears: MM_FP32 or MM_BF16
  float eps;
  const float* norm;  // [hidden], after the last layer
  const mm_decoder_layer* layers;
  int32_t rotary_dim;  // the first rotary_dim values of a head are rotated; 0: all
  int32_t gated;  // whether qkv has num_heads more heads, whose sigmoids multiply attention's output
  int32_t norm_once;  // whether bfloat16 norms round only after multiplying by their weight
  mm_delta_sizes delta;
} mm_decoder;

// A step of t tokens. Matrices are contiguous and have the decoder's dtype unless a comment says otherwise.
typedef struct {
  int32_t num_tokens, num_deepstack;
  const void* embeds;  // [t, hidden]
  const void* deepstack;  // [num_deepstack, t, hidden]: added after the first layers
  const float *cos, *sin;  // [t, rotary_dim / 2], rounded to the decoder's dtype
  void* hidden;  // [t, hidden]: the result
  void* qkv;  // scratch: [t, heads, head_dim]: rotated q, rotated k, v, and gates if the decoder is gated
  void* mixed;  // scratch: [t, num_heads, head_dim]
  void* normed;  // scratch: [t, hidden]
  void* product;  // scratch: [t, intermediate]
  void* aux_rows;  // [t, num_aux_layers * hidden]: the inputs of the layers in `aux_hidden_states`, side by side
  int64_t aux_stride;  // elements between rows of `aux_rows`
  const int32_t* aux_hidden_states;  // [num_aux_layers]: layers; num_layers stands for the input of the final norm
  int32_t num_aux_layers;  // 0: nothing is stored
  const mm_state_step* states;  // the delta nets' states, or NULL
  const mm_lora_step* lora;  // adapters for MM_LORA_LINEARS linears of each layer, or NULL
} mm_decoder_step;

// Runs all layers and the final norm. kv_layers: the KV of each attention layer in the pool. Returns 0, or 1 if memory
// cannot be allocated.
int32_t mm_decoder_forward(const mm_decoder* decoder, const mm_decoder_step* step, const mm_attention_step* attention,
                           void* const* kv_layers);

// The parts of a layer before and after attention, for a caller that computes attention itself. The first function
// writes q, k and v to step->qkv, and the second reads attention's output from `mixed`. The results equal
// mm_decoder_forward's.
int32_t mm_decoder_before_attention(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer);
int32_t mm_decoder_after_attention(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer,
                                   const void* mixed, int64_t mixed_stride);

// Runs a whole layer with a delta net. `place`: how many delta net layers precede the layer.
int32_t mm_decoder_delta_layer(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer, int32_t place);

// mm_decoder_heads computes q, k and v from the normed `inputs`, whose rows are input_stride values apart.
// mm_decoder_attend computes attention over the paged cache, from step->qkv to step->mixed. The results equal
// mm_decoder_forward's.
int32_t mm_decoder_heads(const mm_decoder* decoder, const mm_decoder_step* step, int32_t layer, const void* inputs,
                         int64_t input_stride);
int32_t mm_decoder_attend(const mm_decoder* decoder, const mm_decoder_step* step, const mm_attention_step* attention,
                          void* kv_layer);

// Profiles mm_decoder_forward: nanoseconds are added to ns[0] for linears, ns[1] for attention and ns[2] for everything
// else. NULL, the initial value, turns profiling off. The setting is global to the process.
void mm_profile(int64_t* ns);

// Applies the final norm to step->hidden in place.
void mm_decoder_final_norm(const mm_decoder* decoder, const mm_decoder_step* step);

#ifdef __cplusplus
}
#endif
