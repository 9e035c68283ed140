// Looks up rows in a table of cosines and sines, where each frequency follows one of several positions of a token.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// positions [num_axes, t] with stride position_stride; axis [half]: the axis that a frequency follows. table_cos and
// table_sin [table_len, half]; cos and sin [t, half]. Returns the largest position plus one: if that is more than
// table_len, or negative (because a position is), the output is undefined.
int64_t mm_rotary_rows(const int64_t* positions, int64_t position_stride, int32_t num_tokens, const int32_t* axis,
                       int32_t num_axes, int32_t half, const float* table_cos, const float* table_sin,
                       int64_t table_len, float* cos, float* sin);

#ifdef __cplusplus
}
#endif
