// Low-rank additions to linear layers: y += scale * (x a^T) b^T. Each group of rows has its own a and b.
//
// Sums are float32, and y is rounded once. If the CPU multiplies bfloat16 pairs, each sum x a^T is split into two
// bfloat16 values with 16 significant bits together. A row's result depends neither on other rows nor on the number of
// threads.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// An addition to columns [offset, offset + n) of y.
typedef struct {
  // A pair: two neighbouring columns of 16 rows of a (or b), as [16][2] for bfloat16 or [2][16] for float32.
  const void* a;  // [ceil(rank / 16)][ceil(k / 2)] pairs: a^T, padded with zeros
  const void* b;  // [ceil(n / 16)][ceil(rank / 2)] pairs: b^T, padded with zeros
  int32_t rank, n, offset;
  float scale;
} mm_lora_part;

// The addition to one linear layer. k: columns of x.
typedef struct {
  const mm_lora_part* parts;  // no two parts share a column
  int32_t num_parts, k;
  int32_t dtype;  // dtype of a, b and x: MM_FP32 or MM_BF16
} mm_lora;

// The additions of a step.
typedef struct {
  int32_t num_groups;
  const int32_t* starts;     // [num_groups + 1], start of each group's rows
  const int32_t* rows;       // row indices of x and y, without repetition
  int32_t num_linears;
  const mm_lora* const* of;  // [num_groups * num_linears]; NULL: no addition
} mm_lora_step;

// Returns whether the step has an addition to this linear layer.
int32_t mm_lora_touches(const mm_lora_step* step, int32_t linear);

// Adds to y. Row strides are in elements. Returns 0, or 1 without a change if memory for the sums cannot be allocated.
int32_t mm_lora_add(const mm_lora_step* step, int32_t linear, const void* x, int64_t x_stride, void* y,
                    int64_t y_stride, int32_t y_dtype);

// Returns the additions without y: float32 [m, n], valid until the calling thread's next call. Returns NULL if
// allocation fails.
const float* mm_lora_sums(const mm_lora_step* step, int32_t linear, const void* x, int64_t x_stride, int32_t m,
                          int32_t n);

#ifdef __cplusplus
}
#endif
