#include "layers/rotary.h"

extern "C" {

int64_t mm_rotary_rows(const int64_t* positions, int64_t position_stride, int32_t num_tokens, const int32_t* axis,
                       int32_t num_axes, int32_t half, const float* table_cos, const float* table_sin,
                       int64_t table_len, float* cos, float* sin) {
  int64_t length = 0;
  for (int32_t row = 0; row < num_axes; ++row)
    for (int32_t i = 0; i < num_tokens; ++i) {
      int64_t position = positions[row * position_stride + i];
      if (position < 0) return -1;
      if (position >= length) length = position + 1;
    }
  if (length > table_len) return length;
  for (int32_t i = 0; i < num_tokens; ++i)
    for (int32_t f = 0; f < half; ++f) {
      int64_t from = positions[axis[f] * position_stride + i] * half + f;
      cos[(int64_t)i * half + f] = table_cos[from];
      sin[(int64_t)i * half + f] = table_sin[from];
    }
  return length;
}

}  // extern "C"
