// The packed layout of linear layers, and LinearJob, a call of a layer.
//
// Layout; zeros pad k to whole steps of 32, and n to whole panels of 32 columns:
//     float32   [panel][k][32]
//     bfloat16  [panel][k / 32][16 pairs of k][32 columns][2]: each half of a step's columns is an AMX tile, whose rows
//               are in alternate cache lines. vdpbf16ps kernels read the lines in order. On an AMD EPYC, this is three
//               times as fast as halves that are stored 1 KB apart.
//     codes     [panel][k / group]: 32 scales, 32 mins if there are any, then group * 32 codes (linear/codes.h); k is
//               padded to whole groups with zeros. FP8 scales are float32, integer scales float16; mins float32.
//               With VBMI but without AMX, the cache lines of two neighbouring int4 panels alternate. Kernels multiply
//               both panels at once, because a single panel has too few independent sums. Separate panels would be
//               prefetched badly.
// A panel's columns are 32 rows of w. If gate and up are packed together, a panel has 16 rows of gate and the
// corresponding 16 rows of up.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/blocks.h"
#include "linear/linear.h"

namespace mm {

constexpr int kPanel = 32;  // columns per panel
constexpr int kStep = 32;   // values of k per step of a bfloat16 panel
constexpr int kPieces = 8;  // portions of panels per thread; faster threads take more portions

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Return the offsets of the mins and of the codes in a group, and the group's size in bytes.
inline int64_t mins_at(const mm_linear& linear) { return kPanel * (linear.form == MM_FP8 ? 4 : 2); }
inline int64_t codes_at(const mm_linear& linear) { return mins_at(linear) + (linear.mins ? kPanel * 4 : 0); }
inline int64_t group_bytes(const mm_linear& linear) {
  return codes_at(linear) + (int64_t)linear.group * kPanel / (linear.form == MM_INT4 ? 2 : 1);
}

// Returns 2 if panels are stored in pairs with alternating cache lines, else 1.
inline int alternating(const mm_linear& linear) {
#if defined(__AVX512VBMI__) && !defined(__AMX_BF16__)
  return linear.form == MM_INT4 && !linear.x_form ? 2 : 1;
#else
  (void)linear;
  return 1;
#endif
}

// Convert a byte's index in a panel or group to its offset in memory, and return the distance between groups.
inline int64_t placed(const mm_linear& linear, int64_t byte) {
  return byte / 64 * 64 * alternating(linear) + byte % 64;
}
inline int64_t group_step(const mm_linear& linear) { return group_bytes(linear) * alternating(linear); }

// Returns how many steps of kStep values of k a panel of bfloat16 or codes has.
inline int64_t linear_steps(const mm_linear& linear) {
  if (!linear.group) return ceil_div(linear.k, kStep);
  return ceil_div(linear.k, linear.group) * (linear.group / kStep);
}

inline int64_t linear_panel_bytes(const mm_linear& linear) {
  if (linear.group) return ceil_div(linear.k, linear.group) * group_bytes(linear);
  return linear.dtype == MM_BF16 ? linear_steps(linear) * 2048 : (int64_t)linear.k * 128;
}

inline int64_t panel_at(const mm_linear& linear, int64_t panel) {
  if (linear.form == MM_BLOCKS) return block_panel_at(linear, panel);
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
      nullptr;  // the row of x for each of the m rows, used by linear_prepare; NULL: rows are consecutive
  const float* added = nullptr;  // for gate and up: [m, n], added to the sums before silu, or NULL

  bool bf16() const { return linear->dtype == MM_BF16; }
  bool prepares() const { return bf16() || linear->group; }  // whether linear_prepare converts x for linear_run_bf16
  int panels() const { return (int)ceil_div(linear->n, kPanel); }
  int steps() const { return (int)linear_steps(*linear); }
  const char* panel(int p) const { return (const char*)linear->packed + panel_at(*linear, p); }
  const char* row(int i) const { return (const char*)x + (gathered ? gathered[i] : i) * x_stride * (bf16() ? 2 : 4); }
  int groups() const { return linear->group ? (int)ceil_div(linear->k, linear->group) : 0; }
};

// The part of a job that one thread computes. `room`: linear_thread_bytes of scratch memory for this thread.
struct Share {
  int row0, row1, panel0, panel1;
  char* room;
};

// Converts float32 sums c [rows, ldc] of a panel to rows [row0, row0 + rows) of y.
void linear_store(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel);

// Kernels. `prepare` converts rows [row0, row1) of x for `run`. `scratch`: linear_scratch_bytes(job) bytes for all m
// rows of the job.
int64_t linear_scratch_bytes(const LinearJob& job);
int64_t linear_thread_bytes(const LinearJob& job);
void linear_prepare(const LinearJob& job, void* scratch, int row0, int row1);
void linear_run_bf16(const LinearJob& job, const void* scratch, const Share& share);
void linear_run_fp32(const LinearJob& job, const Share& share);

// Runs several jobs in one parallel region; no two jobs may write the same values of y. Returns false if memory for the
// rows of x cannot be allocated.
bool linear_run_jobs(const LinearJob* jobs, int count);

}  // namespace mm
