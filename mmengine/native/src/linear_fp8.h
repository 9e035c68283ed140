// FP8 weights of a panel to bfloat16.
//
// The codes of a group lie [group / 4][2 halves][4][2 pairs of k][4 columns][2]: a half of two pairs is a cache
// line, whose bytes interleave to what bfloat16 has (linear_job.h).
#pragma once

#include "linear_job.h"

namespace mm {

// Where the code of a column at t lies among those of its group.
inline int64_t place_fp8(int column, int64_t t) {
  return t / 4 * 128 + column / 16 * 64 + column % 16 / 4 * 16 + t / 2 % 2 * 8 + column % 4 * 2 + t % 2;
}

// A group, scales before codes, as `size` / 32 steps of bfloat16.
void fp8_decode(const char* group, int size, char* out);

// One value of it.
uint16_t fp8_decode_one(const char* group, int column, int64_t t);

}  // namespace mm
