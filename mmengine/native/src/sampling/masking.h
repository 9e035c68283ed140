// Packed masks of allowed tokens on rows of logits.
#pragma once

#include <cstdint>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {  // m rows; all arrays are host memory
  int32_t rows, vocab;
  float* logits;             // rows lie `stride` values apart
  int64_t stride;
  const int64_t* places;     // [m], which rows of `logits`
  const uint32_t* bits;      // [m, words], token t is bit t % 32 of word t / 32
  int32_t words;
  const uint8_t* writes;     // [m], whether the row's other logits become -inf; else it is only read
  int32_t* tokens;           // [m] out: the most likely allowed token, of equals the lowest
  float* largest;            // [m] out: its logit; -inf where nothing is allowed
} mm_masks;

void mm_keep_allowed(const mm_masks*);

#ifdef __cplusplus
}
#endif
