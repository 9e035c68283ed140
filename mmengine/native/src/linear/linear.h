// Linear layers over packed weights: y = x w^T + bias, w [n, k], float32 or bfloat16.
//
// Weights of a bfloat16 layer may be held as codes, with a scale for each group of them beside each other along
// k. Of FP8, codes of e4m3, what is multiplied is bfloat16(code * scale), so the bits of y are those of a layer
// whose weights are that from the start. int8 and int4 are whole numbers, and a group may have a smallest value,
// too: code * scale + min. Their codes are multiplied as they are and each group's sum is scaled, in float32,
// so that no weight is rounded; with AMX, which has its sums in tiles, weights are rounded as those of FP8. Where
// asked for, x is rounded to int8, and whole numbers are multiplied.
//
// Weights are packed once into panels of 32 output columns, each panel contiguous over all of k, so that
// a matmul of few rows reads the weights once, in address order. A row's result never depends on the
// other rows of the call nor on the number of threads: every path of one build sums over k in one order.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MM_FP32 = 0, MM_BF16 = 1, MM_MAX_GROUP = 256 };
enum { MM_PLAIN = 0, MM_FP8 = 1, MM_INT8 = 2, MM_INT4 = 3 };

typedef struct {
  int32_t n, k, dtype;
  int32_t form;        // MM_PLAIN: weights of dtype; else dtype is MM_BF16
  int32_t group;       // 0, or the codes of a scale: a multiple of 32 up to MM_MAX_GROUP
  int32_t mins;        // whether groups of int8 or int4 have a smallest value
  const void* packed;  // mm_linear_bytes, aligned to 64 bytes
  const float* bias;   // [n] or NULL
  int32_t x_form;      // MM_PLAIN; with int8 and int4 also MM_INT8: rows of x are rounded to it (linear/int8.h)
} mm_linear;

int64_t mm_linear_bytes(const mm_linear* linear);

// Rows [first, first + count) of a weight [n, k] into `packed`, mm_linear_bytes of zeros before the first of
// them. w is these rows, row-major, of the layer's dtype or codes, a byte each: e4m3 without NaN, int8 from -127,
// int4 from -8 to 7. Of codes also scales [count, ceil(k / group)], of integers as float16 has them, and where
// there are any as many mins; else NULL. half: 0, or i where the weight is [2i, k] for mm_linear_gate_up, gate's
// rows first.
void mm_linear_pack(const mm_linear* linear, const void* w, const float* scales, const float* mins, int32_t first,
                    int32_t count, int32_t half, void* packed);

// Rows of w, of the layer's dtype, codes rounded to it, back out of the packed form: out [count, k]. A row outside
// [0, n) becomes zeros.
void mm_linear_rows(const mm_linear* linear, const int64_t* rows, int32_t count, void* out);

// x [m, k] and y [m, n] with strides in elements between rows. y is float32 where y_fp32 is set, else of
// the linear's dtype. residual (or NULL) has y's dtype and stride and may be y: y = residual + (...).
// bfloat16 sums in float32, and rounds before the residual is added and again after. Gives 0, or 1 where
// memory for its rows could not be had; y is not complete then.
int32_t mm_linear_run(const mm_linear* linear, const void* x, int64_t x_stride, int32_t m, void* y, int64_t y_stride,
                      int32_t y_fp32, const void* residual);

// Gate and up in one pass, of a weight that was packed with half i.
// y [m, i] = silu(x gate^T) * (x up^T); linear->n is 2i and its bias, if any, [2i] as gate_up's rows are.
// bfloat16 rounds gate, up and silu(gate) before the product. `added` (or NULL): [m, 2i], gate's columns first,
// is added to both, which are rounded again. Gives what mm_linear_run gives.
int32_t mm_linear_gate_up(const mm_linear* linear, const void* x, int64_t x_stride, int32_t m, void* y,
                          int64_t y_stride, const float* added);

#ifdef __cplusplus
}
#endif
