// Copies the tokens' rotary cosines and sines from a table. A token has a position on each of several axes (such as
// time, height and width), and each frequency uses the position on one axis.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// positions [num_axes, t]: position_stride is the distance between axes. axis [half]: each frequency's axis. table_cos
// and table_sin: [table_len, half]. Writes cos and sin [t, half], and returns the largest position plus one. Returns -1
// for a negative position. Writes nothing if the result is -1 or more than table_len.
int64_t mm_rotary_rows(const int64_t* positions, int64_t position_stride, int32_t num_tokens, const int32_t* axis,
                       int32_t num_axes, int32_t half, const float* table_cos, const float* table_sin,
                       int64_t table_len, float* cos, float* sin);

#ifdef __cplusplus
}
#endif
