// What the parts of the linear layers share: the packed layout, a call as a job, and its epilogue.
//
// Layout, k padded to whole steps of 32 with zeros, n to whole panels of 32 columns:
//   float32   [panel][k][32]
//   bfloat16  [panel][k / 32][16 pairs of k][32 columns][2]: each half of the columns of a step is one
//             tile as AMX multiplies it, of every other cache line. Who multiplies pair after pair (vdpbf16ps)
//             reads line after line; where the halves lay 1 KB apart, AMD EPYC read a third as fast.
//   codes     [panel][k / group]: 32 scales, 32 mins where there are any, then group * 32 codes (linear/codes.h);
//             k padded to whole groups with zeros. Scales of FP8 are float32, of integers float16; mins float32.
//             Panels of int4 stand in pairs with VBMI, whose cache lines alternate: by one panel the sums of a row
//             wait for themselves, and two that lie in two places are fetched ahead badly.
// A panel's columns are 32 rows of w; where gate and up are packed together, 16 rows of gate and the
// same 16 of up.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/linear.h"

namespace mm {

constexpr int kPanel = 32;  // columns of a panel
constexpr int kStep = 32;   // values of k in a step of a bfloat16 panel
constexpr int kPieces = 8;  // in which a thread takes its panels, where all are equally fast

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of a group: where its mins lie, where its codes do, and how large it is.
inline int64_t mins_at(const mm_linear& linear) { return kPanel * (linear.form == MM_FP8 ? 4 : 2); }
inline int64_t codes_at(const mm_linear& linear) { return mins_at(linear) + (linear.mins ? kPanel * 4 : 0); }
inline int64_t group_bytes(const mm_linear& linear) {
  return codes_at(linear) + (int64_t)linear.group * kPanel / (linear.form == MM_INT4 ? 2 : 1);
}

// How many panels stand in a pair, or alone.
inline int alternating(const mm_linear& linear) {
#if defined(__AVX512VBMI__) && !defined(__AMX_BF16__)
  return linear.form == MM_INT4 && !linear.x_form ? 2 : 1;
#else
  (void)linear;
  return 1;
#endif
}

// Where a byte of a panel, or of a group, lies behind its beginning; and a group behind the one before.
inline int64_t placed(const mm_linear& linear, int64_t byte) {
  return byte / 64 * 64 * alternating(linear) + byte % 64;
}
inline int64_t group_step(const mm_linear& linear) { return group_bytes(linear) * alternating(linear); }

// Of kStep values of k, in a panel of bfloat16 or codes.
inline int64_t linear_steps(const mm_linear& linear) {
  if (!linear.group) return ceil_div(linear.k, kStep);
  return ceil_div(linear.k, linear.group) * (linear.group / kStep);
}

inline int64_t linear_panel_bytes(const mm_linear& linear) {
  if (linear.group) return ceil_div(linear.k, linear.group) * group_bytes(linear);
  return linear.dtype == MM_BF16 ? linear_steps(linear) * 2048 : (int64_t)linear.k * 128;
}

inline int64_t panel_at(const mm_linear& linear, int64_t panel) {
  const int count = alternating(linear);
  return panel / count * count * linear_panel_bytes(linear) + panel % count * 64;
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
  const int32_t* gathered =
      nullptr;  // which row of x each of the m is, for linear_prepare; NULL: they follow each other
  const float* added = nullptr;  // of gate and up: [m, n], what is added before anything is made of them, or NULL

  bool bf16() const { return linear->dtype == MM_BF16; }
  int panels() const { return (int)ceil_div(linear->n, kPanel); }
  int steps() const { return (int)linear_steps(*linear); }
  const char* panel(int p) const { return (const char*)linear->packed + panel_at(*linear, p); }
  const char* row(int i) const { return (const char*)x + (gathered ? gathered[i] : i) * x_stride * (bf16() ? 2 : 4); }
  int groups() const { return linear->group ? (int)ceil_div(linear->k, linear->group) : 0; }
};

// The part of a job that one thread computes. `room`: linear_thread_bytes of its own.
struct Share {
  int row0, row1, panel0, panel1;
  char* room;
};

// Writes rows [row0, row0 + rows) of one panel from float32 sums c [rows, ldc].
void linear_store(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel);

// Kernels. `prepare` brings rows [row0, row1) of x into the form that `run` reads, in `scratch`, which
// holds linear_scratch_bytes(job) for all m rows of the job.
int64_t linear_scratch_bytes(const LinearJob& job);
int64_t linear_thread_bytes(const LinearJob& job);
void linear_prepare(const LinearJob& job, void* scratch, int row0, int row1);
void linear_run_bf16(const LinearJob& job, const void* scratch, const Share& share);
void linear_run_fp32(const LinearJob& job, const Share& share);

// Several calls in one pass of the threads, whose ys share no row. False where there is no memory for their rows.
bool linear_run_jobs(const LinearJob* jobs, int count);

}  // namespace mm
