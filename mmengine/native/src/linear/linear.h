// Linear layers over packed weights: y = x w^T + bias, w [n, k], float32 or bfloat16.
//
// The weights of a layer may be stored as codes, with a scale per group of codes along k. FP8 codes (e4m3) are
// multiplied as bfloat16(code * scale), so y has the same bits as with a layer of these bfloat16 weights. int8 and int4
// codes are integers, and a group may also have a minimum: a weight is code * scale + min. Integer codes are multiplied
// unscaled, and each group's sum is scaled in float32, so that no weight is rounded. AMX adds up several groups in a
// tile register, so a group's sum cannot be scaled there. With AMX, weights are therefore scaled before the product and
// rounded to bfloat16, as with FP8. A float32 layer may have integer codes on CPUs without bfloat16 instructions.
// Optionally x is quantised to int8 or int16, and integers are multiplied.
//
// A layer may also have the blocks of a GGUF file, of one type for each run of panels (mm_linear_blocks). A float32 layer
// multiplies the weights that the blocks stand for, so y has the same bits as with a layer of these float32 weights. A
// bfloat16 layer multiplies blocks like integer codes.
//
// Weights are packed once into panels of 32 output columns, each panel contiguous over all of k, so that a matmul with
// few rows reads the weights once, in address order. A row's result never depends on the call's other rows or the
// number of threads: every path of one build sums over k in the same order.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MM_FP32 = 0, MM_BF16 = 1, MM_MAX_GROUP = 256 };
enum { MM_PLAIN = 0, MM_FP8 = 1, MM_INT8 = 2, MM_INT4 = 3, MM_BLOCKS = 4, MM_INT16 = 5 };

// A run of panels with the same GGUF type (linear/blocks.h), from `panel` to the panel before the next run.
typedef struct {
  int32_t panel, type;
} mm_block_run;

typedef struct {
  int32_t n, k, dtype;
  int32_t form;  // MM_PLAIN: the weights are stored as `dtype`; MM_FP8 needs the dtype MM_BF16
  int32_t group;  // 0, or codes per scale: a multiple of 32 up to MM_MAX_GROUP
  int32_t mins;  // whether int8 or int4 groups have a minimum
  const void* packed;  // mm_linear_bytes, aligned to 64 bytes
  const float* bias;  // [n] or NULL
  int32_t x_form;  // MM_PLAIN; or, with MM_BF16, MM_INT8 or MM_INT16: rows of x are quantised (linear/int8.h)
  int32_t num_runs;
  const mm_block_run* runs;  // for MM_BLOCKS: [num_runs] in order; the first begins with panel 0. Else NULL
} mm_linear;

// Returns the size of the packed weight in bytes.
int64_t mm_linear_bytes(const mm_linear* linear);

// Packs rows [first, first + count) of a weight [n, k] into `packed`, mm_linear_bytes of memory that is zeroed before
// the first call. w holds these rows, row-major, in the layer's dtype or as codes of one byte: e4m3 without NaN, int8
// from -127 to 127, int4 from -8 to 7. `scales`: [count, ceil(k / group)] for codes, representable in float16 for
// integers; else NULL. `mins`: the same shape, or NULL. `half`: 0, or i if the weight is [2i, k] for mm_linear_gate_up,
// gate's rows first.
// For MM_BLOCKS, w holds rows of a GGUF file's blocks, all of one type, and there are no scales.
void mm_linear_pack(const mm_linear* linear, const void* w, const float* scales, const float* mins, int32_t first,
                    int32_t count, int32_t half, void* packed);

// Unpacks rows of w to out [count, k] in the layer's dtype, to which decoded weights are rounded. A row outside [0, n)
// becomes zeros.
void mm_linear_rows(const mm_linear* linear, const int64_t* rows, int32_t count, void* out);

// Computes y [m, n] = x w^T + bias for x [m, k], plus `residual` unless that is NULL. Strides are in elements between
// rows. y is float32 if y_fp32 is set, else it has the linear's dtype. residual has y's dtype and stride, and may be y.
// A bfloat16 layer sums in float32, and rounds before and after adding the residual. Returns 0, or 1 if scratch memory
// cannot be allocated; y is then incomplete.
int32_t mm_linear_run(const mm_linear* linear, const void* x, int64_t x_stride, int32_t m, void* y, int64_t y_stride,
                      int32_t y_fp32, const void* residual);

// Returns whether layers of dtype float32 may have int8 or int4 codes: 1 on CPUs without bfloat16 instructions, whose
// kernels convert x to float32 anyway.
int32_t mm_linear_codes_fp32(void);

// Returns whether layers of this dtype may have MM_BLOCKS.
int32_t mm_linear_blocks(int32_t dtype);

// Returns whether blocks of a GGUF type are multiplied faster as int8 or int4 codes, which take about as many bits.
int32_t mm_linear_prefers_codes(int32_t type);

// Returns whether layers may have the x_form MM_INT16.
int32_t mm_linear_int16(void);

// Returns whether MM_INT16 is faster than multiplying int8 weights without quantising x.
int32_t mm_linear_prefers_int16(void);

// Computes gate and up in one pass, with a weight that was packed with half = i: y [m, i] = silu(x gate^T) * (x up^T).
// linear->n is 2i, and the bias, if any, is [2i], gate's values first. A bfloat16 layer rounds gate, up and silu(gate)
// before the product. `added`: NULL, or [m, 2i], gate's columns first, which is added to gate and up; both are rounded
// again. Returns the same as mm_linear_run.
int32_t mm_linear_gate_up(const mm_linear* linear, const void* x, int64_t x_stride, int32_t m, void* y,
                          int64_t y_stride, const float* added);

#ifdef __cplusplus
}
#endif
