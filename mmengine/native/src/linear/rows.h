// A call's rows in the form that bfloat16 layers read without AMX.
#pragma once

#include "linear/job.h"

namespace mm {

#if defined(__AVX512BF16__)
typedef uint16_t Scratch;
#else
typedef float Scratch;
#endif

// Rows of x in scratch. `sums`: the sums of their groups. `alone`: the call has no other row.
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

// AVX2 separates int4 codes by masks, as 0 to 15 times a power of two, by which a single row is divided
// (linear/codes_avx2.h).
constexpr float kMaskedBy[] = {1, 0x1p-8f, 0x1p-4f, 0x1p-12f};  // by k
inline bool is_masked(const mm_linear& linear) {
#if defined(__AVX512F__)
  return false;
#else
  return linear.form == MM_INT4;
#endif
}

// Whether the sums of a row's groups are needed.
inline bool wants_sums(const mm_linear& linear) { return linear.mins || is_masked(linear); }

// The height of blocks with at most `most` rows: all equal, except the last.
inline int height_of(int count, int most) { return (int)ceil_div(count, ceil_div(count, most)); }

// Sums of rows over `panels` panels: c [panels, rows, 32]. One panel, or two alternating ones for at most kPairRows
// rows.
constexpr int kPairRows = 6;
void run_panels(int panels, const Rows& rows, const char* first, float* c);

}  // namespace mm
