// Operations of a vision tower over the packed patches of many images. dtype: 0 float32, 1 bfloat16.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int32_t num_segments, num_heads, head_dim, dtype;  // head_dim: a multiple of 8, at most 256
  const int32_t* starts;  // [num_segments + 1] first patch of each segment, then the number of patches
  const float* cos;       // [patches, head_dim] rotation of q and k; NULL: no rotation
  const float* sin;       // [patches, head_dim], the first half negated
} mm_segments;

// Attends from each patch of [first, last) to all patches of its segment. qkv: [patches, 3 * num_heads * head_dim], q
// then k then v; out: [last - first, num_heads * head_dim]. Strides: elements between patches. A patch's result
// depends only on the patch's segment. Returns 0, or 1 if scratch memory cannot be allocated.
int32_t mm_vision_attention(const mm_segments* segments, const void* qkv, int64_t qkv_stride, int64_t first,
                            int64_t last, void* out, int64_t out_stride);

// x = gelu(x) with the tanh approximation, for `count` values in place.
void mm_vision_gelu(void* x, int64_t count, int32_t dtype);

// out = (pixel / 255 - 0.5) / 0.5, each operation rounded to float32.
void mm_vision_pixels(const uint8_t* pixels, int64_t count, int32_t dtype, void* out);

#ifdef __cplusplus
}
#endif
