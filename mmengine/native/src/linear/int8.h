// Integer weights times rows of x that are quantised to integers, for layers whose x_form is MM_INT8 or MM_INT16.
//
// 32 consecutive values of x share a scale, which is their largest magnitude / 127 or, for MM_INT16, / 32,639. A code
// is value / scale, rounded to the nearest integer. Products of codes are summed exactly, 32 values of k at a time.
// Each such sum is multiplied by the scale of x, and a group's sum by the group's scale, in float32. So y has the same
// bits with every instruction set.
//
// MM_INT16 needs int8 weights in groups of 32 without mins, and AVX-512 VNNI. A code of x is 256 * high + low with two
// signed bytes, and the sums of the two bytes' products are added up with these factors. A sum is at most
// 32 * 32,639 * 127 < 2^27. The rounding error is at most about 2^-16 of a block's largest magnitude.
//
// int8 codes are laid out as [group / 4][32 columns][4 of k]. int4, as code + 8, is laid out as [group / 8][32
// columns][4 bytes]: the low half of a byte holds one of the first 4 values of k, the high half one of the next 4.
#pragma once

#include "linear/job.h"

namespace mm {

int64_t int8_scratch_bytes(const LinearJob& job);
void int8_prepare(const LinearJob& job, void* scratch, int row0, int row1);
void int8_run(const LinearJob& job, const void* scratch, const Share& share);

// Like encode_column and decode_one (linear/codes.h), for layers with an x_form.
void int8_encode(const mm_linear& linear, char* group, int column, const uint8_t* codes, int64_t count, float scale,
                 float min);
float int8_decode_one(const mm_linear& linear, const char* group, int column, int64_t t);

}  // namespace mm
