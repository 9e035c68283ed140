// The gated delta net over recurrent states: a convolution of a few taps, and for each head a matrix S that every
// token decays and corrects.
//
//   S = exp(g) S;  S += k (beta (v - S'k))';  o = S'q      q and k of length 1, q over sqrt(key_dim), all in float32
//
// Every token goes by this rule, one after the other, be it of a prompt, of an answer, a draft, or computed once
// more: the bits of a state depend neither on how tokens are spread over steps, nor on other rows, nor on threads.
// A block of 32 columns of S stays in the first cache for all tokens of a row, so a long prompt costs no memory
// either, and one pass over it does a token: its correction, what it gives, and what the next token's k will see.
#pragma once

#include "linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MM_MAX_KEY_DIM = 256, MM_MAX_TAPS = 16 };

typedef struct {
  int32_t num_key_heads, num_heads;  // of q and k; of v, a multiple
  int32_t key_dim, value_dim;        // up to MM_MAX_KEY_DIM; a multiple of 16
  int32_t taps;                      // 2 to MM_MAX_TAPS
} mm_delta_sizes;

typedef struct {
  mm_linear ba;          // to 2 * num_heads values: what beta, and what the decay is made of
  const float* conv;     // [taps, width], width = 2 * num_key_heads * key_dim + num_heads * value_dim
  const float* decay;    // [num_heads], negative
  const float* dt_bias;  // [num_heads]
  const float* norm;     // [value_dim]
} mm_delta;

// A step of n rows. A row's work are the tokens behind its state: first those of a step before that stayed, whose
// inputs are in `pending`, then its tokens of this step. Strides are in elements. As mmengine/models/states.py says.
typedef struct {
  int32_t num_rows, num_work;
  const int32_t *query_starts, *work_starts;              // [n + 1] where its tokens, and where its work begins
  const int32_t *slots, *rows, *certain;                  // [n]
  const int32_t *kept_starts, *kept_after, *kept_slots;   // [n + 1], [k], [k]
  void* conv;        // [slots, layers, taps - 1, width], of the decoder's dtype
  float* recurrent;  // [slots, layers, num_heads, value_dim / 32, key_dim, 32], behind them the last 16 columns if any
  void* pending;  // [rows, layers, room, width + 2 * num_heads], of the decoder's dtype
  int64_t conv_slot, conv_layer, recurrent_slot, recurrent_layer, pending_row, pending_layer;
  void* ba;  // [t, 2 * num_heads] of the decoder's dtype: what mm_delta.ba gives
  float* acts;  // [num_key_heads, num_work, 2, key_dim] of q and k, [num_heads, num_work, value_dim] of v: scratch
  float* gates;  // [num_heads, num_work, 2]: scratch
} mm_state_step;

// projected [t, width + num_heads * value_dim]: the channels of the convolution, and the gate of the output.
// mixed [t, num_heads * value_dim]. Both of `dtype` without gaps. `layer`: of those with states.
void mm_delta_mix(const mm_delta_sizes* sizes, const mm_delta* weights, const mm_state_step* step, int32_t layer,
                  const void* projected, int32_t dtype, float eps, void* mixed);

#ifdef __cplusplus
}
#endif
