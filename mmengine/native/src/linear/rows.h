// A call's rows of x, converted for the kernels without AMX.
#pragma once

#include "linear/job.h"

namespace mm {

#if defined(__AVX512BF16__)
typedef uint16_t Scratch;
#else
typedef float Scratch;
#endif

// Rows of x in scratch. `sums`: [count, groups], each row's sums of x over the groups (for blocks, see sums_in_row).
// `alone`: the call has one row.
struct Rows {
  const mm_linear& linear;
  const Scratch* x;
  int64_t stride;
  const float* sums;
  int count, groups;
  bool alone;

  Rows some(int first, int most) const {
    const int left = count - first, taken = left < most ? left : most;
    return {linear, x + first * stride, stride, sums + (int64_t)first * groups, taken, groups, alone};
  }
};

// AVX2 kernels mask int4 codes without a shift, so a masked code has a power of two as a factor. A single row of x is
// multiplied by the inverse powers, indexed by k % 4 (linear/codes_avx2.h).
constexpr float kMaskedBy[] = {1, 0x1p-8f, 0x1p-4f, 0x1p-12f};
inline bool is_masked(const mm_linear& linear) {
#if defined(__AVX512F__)
  return false;
#else
  return linear.form == MM_INT4;
#endif
}

// Returns how many sums of x over groups a row needs. For blocks, the sums of 32 values each come first, then the sums
// of 16 values each.
inline int sums_in_row(const mm_linear& linear) {
  if (linear.form == MM_BLOCKS) return linear.k / 32 + linear.k / 16;
  return linear.mins || is_masked(linear) ? (int)ceil_div(linear.k, linear.group) : 0;
}
inline bool wants_sums(const mm_linear& linear) { return sums_in_row(linear) > 0; }

// Returns the number of rows per block if `count` rows form the fewest blocks with at most `most` rows. The last block
// may have fewer rows.
inline int height_of(int count, int most) { return (int)ceil_div(count, ceil_div(count, most)); }

// Multiplies rows with `panels` panels: c [panels, rows, 32]. `panels` is 1, or 2 for a pair of alternating panels with
// at most kPairRows rows.
constexpr int kPairRows = 6;
void run_panels(int panels, const Rows& rows, const char* first, float* c);

#if defined(__AVX512BF16__)
// Multiplies rows with a panel of blocks: c [rows, 32].
void run_block_panel(int type, const Rows& rows, const char* panel, float* c);
#endif

}  // namespace mm
