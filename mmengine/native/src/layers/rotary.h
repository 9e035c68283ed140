// Copies the tokens' rotary cosines and sines from a table. A token has a position on each of several axes (such as
// time, height and width), and each frequency uses the position on one axis.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// positions [num_axes, t], with position_stride values from axis to axis; axis [half]: the axis for each frequency;
// table_cos and table_sin [table_len, half]. Writes cos and sin [t, half]. Returns the largest position plus one, or -1
// if a position is negative. If the result is -1 or more than table_len, cos and sin were not written.
int64_t mm_rotary_rows(const int64_t* positions, int64_t position_stride, int32_t num_tokens, const int32_t* axis,
                       int32_t num_axes, int32_t half, const float* table_cos, const float* table_sin,
                       int64_t table_len, float* cos, float* sin);

#ifdef __cplusplus
}
#endif
