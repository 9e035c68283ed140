// What a decoder layer does to rows of values besides linears and attention.
#pragma once

#include <cstdint>

namespace mm {

// The dtype of rows, MM_FP32 or MM_BF16, and the threads are the callee's business.
struct Rows {
  void* data;
  int64_t stride;  // elements
  int count, dtype;
};

// out = x / rms(x) * weight over `size` values of each row; out may be x. `once`: bfloat16 is rounded behind the
// weight alone.
void rms_norm_rows(const Rows& x, const float* weight, int size, float eps, const Rows& out, bool once = false);

struct HeadNorm {
  const float *q_weight, *k_weight;  // [head_dim], or NULL: no norm
  float eps;
  const float *cos, *sin;  // [rows, head_dim / 2]
  int num_heads, num_kv_heads, head_dim;
  int rotary_dim;  // of a head, so many values are rotated, and cos and sin are of half as many; 0: all
  bool once;       // as of rms_norm_rows
};

// q's and k's heads of each row of qkv, in place: RMS norm of the head where it has a weight, then the rotation of
// the halves of what is rotated.
void norm_and_rotate(const Rows& qkv, const HeadNorm& how);

// out = x * sigmoid(gate), `size` values a row; out may be x.
void gate_rows(const Rows& x, const Rows& gate, int size, const Rows& out);

// out = x, `size` values a row.
void copy_rows(const Rows& x, int size, const Rows& out);

// x += y, `size` values a row, no gaps.
void add_rows(const Rows& x, const void* y, int size);

}  // namespace mm
