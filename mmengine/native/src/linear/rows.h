// A call's rows, as bfloat16 layers read them without AMX.
#pragma once

#include "linear/job.h"

namespace mm {

#if defined(__AVX512BF16__)
typedef uint16_t Scratch;
#else
typedef float Scratch;
#endif

// Some rows of x in scratch. `sums`: of their groups. `alone`: no other row is in the call.
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

// AVX2 tells codes of int4 apart by masks, as 0 to 15 times a power of two, by which a row that is alone is divided
// (linear/codes_avx2.h).
constexpr float kMaskedBy[] = {1, 0x1p-8f, 0x1p-4f, 0x1p-12f};  // by k
inline bool is_masked(const mm_linear& linear) {
#if defined(__AVX512F__)
  return false;
#else
  return linear.form == MM_INT4;
#endif
}

// Whether what a row's groups are in sum is wanted.
inline bool wants_sums(const mm_linear& linear) { return linear.mins || is_masked(linear); }

// Blocks of at most so many rows are as high as each other, but for the last.
inline int height_of(int count, int most) { return (int)ceil_div(count, ceil_div(count, most)); }

// Sums of rows by so many panels: c [panels, rows, 32]. One, or two whose lines alternate, of at most kPairRows rows.
constexpr int kPairRows = 6;
void run_panels(int panels, const Rows& rows, const char* first, float* c);

}  // namespace mm
