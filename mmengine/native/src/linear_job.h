// What the parts of the linear layers share: the packed layout, a call as a job, and its epilogue.
//
// Layout, k padded to whole steps of 32 with zeros, n to whole panels of 32 columns:
//   float32   [panel][k][32]
//   bfloat16  [panel][k / 32][16 pairs of k][32 columns][2]: each half of the columns of a step is one
//             tile as AMX multiplies it, of every other cache line. Who multiplies pair after pair (vdpbf16ps)
//             reads line after line; where the halves lay 1 KB apart, AMD EPYC read a third as fast.
//   FP8       [panel][k / group]: 32 scales, float32, then group * 32 codes (linear_fp8.h); k padded to whole
//             groups with zeros
// A panel's columns are 32 rows of w; where gate and up are packed together, 16 rows of gate and the
// same 16 of up.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace mm {

constexpr int kPanel = 32;  // columns of a panel
constexpr int kStep = 32;   // values of k in a step of a bfloat16 panel

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kScaleBytes = kPanel * 4;  // of a group
inline int64_t group_bytes(const mm_linear& linear) { return kScaleBytes + (int64_t)linear.group * kPanel; }

// Of kStep values of k, in a panel of bfloat16 or FP8.
inline int64_t linear_steps(const mm_linear& linear) {
  if (!linear.group) return ceil_div(linear.k, kStep);
  return ceil_div(linear.k, linear.group) * (linear.group / kStep);
}

inline int64_t linear_panel_bytes(const mm_linear& linear) {
  if (linear.group) return ceil_div(linear.k, linear.group) * group_bytes(linear);
  return linear.dtype == MM_BF16 ? linear_steps(linear) * 2048 : (int64_t)linear.k * 128;
}

struct LinearJob {
  const mm_linear* linear;
  const void* x;
  int64_t x_stride;
  int m;
  void* y;
  int64_t y_stride;
  const void* residual;
  bool y_fp32, gate_up;

  bool bf16() const { return linear->dtype == MM_BF16; }
  int panels() const { return (int)ceil_div(linear->n, kPanel); }
  int steps() const { return (int)linear_steps(*linear); }
  const char* panel(int p) const { return (const char*)linear->packed + p * linear_panel_bytes(*linear); }
  // Of a panel of FP8 as one of bfloat16.
  int64_t decoded_bytes() const { return linear->group ? (int64_t)steps() * 2048 : 0; }
  // A panel in the layer's dtype: where it lies, or of FP8 in `decoded`.
  const char* weights(int p, char* decoded) const;
};

// The part of a job that one thread computes. `decoded`: room for LinearJob::decoded_bytes.
struct Share {
  int row0, row1, panel0, panel1;
  char* decoded;
};

// Writes rows [row0, row0 + rows) of one panel from float32 sums c [rows, ldc].
void linear_store(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel);

// Kernels. `prepare` brings rows [row0, row1) of x into the form that `run` reads, in `scratch`, which
// holds linear_scratch_bytes(job, m) for all m rows of the job.
int64_t linear_scratch_bytes(const LinearJob& job);
void linear_prepare(const LinearJob& job, void* scratch, int row0, int row1);
void linear_run_bf16(const LinearJob& job, const void* scratch, const Share& share);
void linear_run_fp32(const LinearJob& job, const Share& share);

}  // namespace mm
