// Draws tokens from rows of logits: temperature, top-k, top-p, min-p, and Gumbel noise.
#pragma once

#include <cstdint>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {  // r rows; all arrays are host memory
  int32_t rows, vocab;
  const float* logits;        // rows have a stride of `stride` values
  int64_t stride;
  const float* temperature;   // [r], above 0
  const int32_t* top_k;       // [r], 1 to vocab; vocab: all
  const float* top_p;         // [r], 1: all
  const float* log_min_p;     // [r], -inf: all
  const int64_t* seed;        // [r]
  const int32_t* output_index;
  const int32_t* sample_index;
  int32_t* tokens;            // [r] out; -1: the two best scores are so close that the caller must decide
} mm_draw;

// Draws the same tokens as filters.py and gumbel.py in mmengine/runtime/sampling. A row whose largest logit is not
// finite gets token 0.
void mm_draw_tokens(const mm_draw*);

#ifdef __cplusplus
}
#endif
