// Norms of rows, for models whose layers are not run by decoder/.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// out = x / rms(x) * weight for `rows` rows of `size` values, float32 (dtype 0) or bfloat16 (1). Rows of x are `stride`
// elements apart; the rows of out are adjacent. weight: float32 [size]. once: 1 rounds a bfloat16 result only
// after the multiplication by the weight; 0 also rounds x / rms(x).
void mm_rms_norm(const void* x, int64_t stride, int32_t rows, int32_t dtype, const float* weight, int32_t size,
                 float eps, int32_t once, void* out);

#ifdef __cplusplus
}
#endif
