// The gated delta net over recurrent states: a convolution of a few taps, and a matrix S per head, which each token
// decays and corrects.
//
//     S = exp(g) S;  S += k (beta (v - S'k))';  o = S'q      q and k are L2-normalised, then q / sqrt(key_dim); float32
//
// All tokens, including drafts and recomputed tokens, follow this rule in sequence. A state's bits therefore do not
// depend on other rows, on threads, or on how tokens are spread over steps. A block of 32 columns of S stays in the L1
// cache for all tokens of a row. One pass over the block computes a token's correction and output, and S'k for the next
// token.
#pragma once

#include "linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MM_MAX_KEY_DIM = 256, MM_MAX_TAPS = 16 };

typedef struct {
  int32_t num_key_heads, num_heads;  // heads of q and k; heads of v, a multiple of num_key_heads
  int32_t key_dim, value_dim;  // key_dim up to MM_MAX_KEY_DIM; value_dim a multiple of 16
  int32_t taps;  // 2 to MM_MAX_TAPS
  int32_t tiled;  // 1: head h of v uses head h % num_key_heads of q and k; 0: h / (num_heads / num_key_heads)
} mm_delta_sizes;

typedef struct {
  mm_linear ba;  // hidden to 2 * num_heads values: the inputs of beta and of the decay
  const float* conv;  // [taps, width], width = 2 * num_key_heads * key_dim + num_heads * value_dim
  const float* decay;  // [num_heads], negative
  const float* dt_bias;  // [num_heads]
  const float* norm;  // [value_dim]
} mm_delta;

// A step of n rows. A row's work is all tokens that its state does not include yet. First come the accepted drafts of
// the row's previous step, with their inputs in `pending`, then this step's tokens. Strides are in elements. See
// mmengine/models/states.py.
typedef struct {
  int32_t num_rows, num_work;
  const int32_t *query_starts, *work_starts;  // [n + 1] start of each row's tokens, and of its work
  const int32_t *slots, *rows, *certain;  // [n]
  const int32_t *kept_starts, *kept_after, *kept_slots;  // [n + 1], [k], [k]
  void* conv;  // [slots, layers, taps - 1, width], of the decoder's dtype
  float* recurrent;  // [slots, layers, num_heads, value_dim / 32, key_dim, 32], followed by the last 16 columns, if any
  void* pending;  // [rows, layers, room, width + 2 * num_heads], of the decoder's dtype
  int64_t conv_slot, conv_layer, recurrent_slot, recurrent_layer, pending_row, pending_layer;
  void* ba;  // [t, 2 * num_heads] in the decoder's dtype: the output of mm_delta.ba
  float* acts;  // scratch: [num_key_heads, num_work, 2, key_dim] for q and k, [num_heads, num_work, value_dim] for v
  float* gates;  // [num_heads, num_work, 2]: scratch
} mm_state_step;

// Mixes one layer. projected [t, width + num_heads * value_dim]: the convolution's channels and the output gate. mixed
// [t, num_heads * value_dim]. Both are contiguous with `dtype`. `layer`: index among the layers with states.
void mm_delta_mix(const mm_delta_sizes* sizes, const mm_delta* weights, const mm_state_step* step, int32_t layer,
                  const void* projected, int32_t dtype, float eps, void* mixed);

#ifdef __cplusplus
}
#endif
