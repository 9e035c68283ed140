// Tokens drawn from rows of logits: temperature, top-k, top-p, min-p, and Gumbel noise.
#pragma once

#include <cstdint>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {  // r rows; all arrays are host memory
  int32_t rows, vocab;
  const float* logits;        // rows lie `stride` values apart
  int64_t stride;
  const float* temperature;   // [r], above 0
  const int32_t* top_k;       // [r], 1 to vocab; vocab: all
  const float* top_p;         // [r], 1: all
  const float* log_min_p;     // [r], -inf: all
  const int64_t* seed;        // [r]
  const int32_t* output_index;
  const int32_t* sample_index;
  int32_t* tokens;            // [r] out; -1: another one is so close that the caller's arithmetic decides
} mm_draw;

// Filters are those of mmengine/runtime/sampling/filters.py, noise is that of gumbel.py, and so are the tokens. A row
// whose largest logit is not finite gives token 0.
void mm_draw_tokens(const mm_draw*);

#ifdef __cplusplus
}
#endif
