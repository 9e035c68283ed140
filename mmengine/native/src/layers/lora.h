// Low-rank additions to linear layers: y += scale * (x a^T) b^T for groups of rows, each with matrices of its own.
//
// What a and b hold is read once for all rows of a group, in address order. Sums are float32; where bfloat16 is
// multiplied in pairs, those by a go on as two bfloat16 that have 16 of their bits. y is rounded once behind them. A
// row's result depends neither on the other rows nor on the number of threads.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Of columns [offset, offset + n) of y.
typedef struct {
  // A pair of k (or of the rank) of bfloat16 lies as [16][2], of float32 as [2][16].
  const void* a;  // [ceil(rank / 16)][ceil(k / 2)] pairs: a^T, zeros behind the rank and behind k
  const void* b;  // [ceil(n / 16)][ceil(rank / 2)] pairs: b^T, zeros behind n and behind the rank
  int32_t rank, n, offset;
  float scale;
} mm_lora_part;

// What is added to one linear layer, whose x has k columns.
typedef struct {
  const mm_lora_part* parts;  // of which no two share a column
  int32_t num_parts, k;
  int32_t dtype;  // of a, b and x: MM_FP32 or MM_BF16
} mm_lora;

// Who is added to what in a step.
typedef struct {
  int32_t num_groups;
  const int32_t* starts;     // [num_groups + 1], where each one's rows begin
  const int32_t* rows;       // of x and y; none is named twice
  int32_t num_linears;
  const mm_lora* const* of;  // [num_groups * num_linears]; NULL: nothing
} mm_lora_step;

// Whether anything is added to a linear layer.
int32_t mm_lora_touches(const mm_lora_step* step, int32_t linear);

// x and y with strides in elements between rows; y of y_dtype. Gives 0, or 1 where memory for the sums could not
// be had; y is as it was then.
int32_t mm_lora_add(const mm_lora_step* step, int32_t linear, const void* x, int64_t x_stride, void* y,
                    int64_t y_stride, int32_t y_dtype);

// The same to zeros [m, n], memory of the calling thread that is good until its next call; NULL where there is none.
const float* mm_lora_sums(const mm_lora_step* step, int32_t linear, const void* x, int64_t x_stride, int32_t m,
                          int32_t n);

#ifdef __cplusplus
}
#endif
