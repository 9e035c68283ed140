// Computes statistics of the tokens that packed masks allow: log-sum-exp, entropy, and the likeliest tokens.
#pragma once

#include <cstdint>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {  // m rows; all arrays are host memory
  int32_t rows, vocab;
  const float* logits;       // rows have a stride of `stride` values
  int64_t stride;
  const int64_t* places;     // [m], each row's index in `logits`
  const uint32_t* bits;      // [m, words], token t is bit t % 32 of word t / 32
  int32_t words, likely;     // likely: k, how many of the likeliest tokens to return, at most 64
  float* log_sum;            // [m] out: log of the sum of exp(logit) over the allowed tokens
  float* entropy;            // [m] out: of the distribution over the allowed tokens, in nats
  int32_t* num_allowed;      // [m] out
  float* best;               // [m, k] out: the largest allowed logits, descending; -inf if fewer are allowed
  int32_t* best_tokens;      // [m, k] out: their tokens, ties to the lowest id; -1 if fewer are allowed
} mm_allowed;

void mm_weigh_allowed(const mm_allowed*);

#ifdef __cplusplus
}
#endif
