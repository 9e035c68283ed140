// Applies packed masks of allowed tokens to rows of logits.
#pragma once

#include <cstdint>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {  // m rows; all arrays are host memory
  int32_t rows, vocab;
  float* logits;             // rows have a stride of `stride` values
  int64_t stride;
  const int64_t* places;     // [m], each row's index in `logits`
  const uint32_t* bits;      // [m, words], token t is bit t % 32 of word t / 32
  int32_t words;
  const uint8_t* writes;     // [m], whether to set the row's forbidden logits to -inf
  int32_t* tokens;           // [m] out: the most likely allowed token, ties to the lowest id
  float* largest;            // [m] out: its logit; -inf if nothing is allowed
} mm_masks;

void mm_keep_allowed(const mm_masks*);

#ifdef __cplusplus
}
#endif
