// Row operations of a decoder layer, besides linears and attention.
#pragma once

#include <cstdint>

namespace mm {

// Rows with their dtype, MM_FP32 or MM_BF16. The functions below divide the work among threads themselves.
struct Rows {
  void* data;
  int64_t stride;  // elements
  int count, dtype;
};

// out = x / rms(x) * weight over `size` values of each row; out may be x. `once`: round to bfloat16 only after the
// multiplication by the weight.
void rms_norm_rows(const Rows& x, const float* weight, int size, float eps, const Rows& out, bool once = false);

struct HeadNorm {
  const float *q_weight, *k_weight;  // [head_dim], or NULL: no norm
  float eps;
  const float *cos, *sin;  // [rows, rotary_dim / 2]
  int num_heads, num_kv_heads, head_dim;
  int rotary_dim;  // number of values of a head that are rotated, twice the width of cos and sin; 0: all
  bool once;       // as in rms_norm_rows
};

// Normalises (if there is a weight) and rotates q's and k's heads in each row of qkv, in place. The rotation is
// NeoX-style: value i is paired with value i + rotary_dim / 2.
void norm_and_rotate(const Rows& qkv, const HeadNorm& how);

// out = x * sigmoid(gate), `size` values per row; out may be x.
void gate_rows(const Rows& x, const Rows& gate, int size, const Rows& out);

// out = x, `size` values per row.
void copy_rows(const Rows& x, int size, const Rows& out);

// x += y, `size` values per row, contiguous.
void add_rows(const Rows& x, const void* y, int size);

}  // namespace mm
