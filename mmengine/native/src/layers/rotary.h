// Rows of a table of cosines and sines, where each frequency follows one of several positions of a token.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// positions [num_axes, t], rows position_stride apart; axis [half]: which of them a frequency follows.
// table_cos and table_sin [table_len, half]; cos and sin [t, half]. Gives the largest position plus one: if
// that is more than table_len, or negative (a position was), nothing useful was written.
int64_t mm_rotary_rows(const int64_t* positions, int64_t position_stride, int32_t num_tokens, const int32_t* axis,
                       int32_t num_axes, int32_t half, const float* table_cos, const float* table_sin,
                       int64_t table_len, float* cos, float* sin);

#ifdef __cplusplus
}
#endif
