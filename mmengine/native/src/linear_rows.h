// A call's rows, as bfloat16 layers read them without AMX.
#pragma once

#include "linear_job.h"

namespace mm {

#if defined(__AVX512BF16__)
typedef uint16_t Scratch;
#else
typedef float Scratch;
#endif

// Some rows of x in scratch. `sums`: of their groups.
struct Rows {
  const mm_linear& linear;
  const Scratch* x;
  int64_t stride;
  const float* sums;
  int count, groups;

  Rows some(int first, int most) const {
    const int left = count - first;
    return {linear, x + first * stride, stride, sums + (int64_t)first * groups, left < most ? left : most, groups};
  }
};

// Blocks of at most so many rows are as high as each other, but for the last.
inline int height_of(int count, int most) { return (int)ceil_div(count, ceil_div(count, most)); }

// Sums of rows by a panel: c [rows, 32].
void run_panel(const Rows& rows, const char* panel, float* c);

}  // namespace mm
