// Integer weights times int8 rows of x: for layers whose x_form is MM_INT8.
//
// 32 consecutive values of x share a scale, their largest magnitude / 127, and are rounded to multiples of it. Products
// of codes are summed exactly, 32 values of k at a time; the sum is multiplied by the scale of x, and a group's sum by
// the group's scale, in float32. So y has the same bits with every instruction set.
//
// Codes are laid out as [group / 4][32 columns][4 of k], int4 as [group / 8]: the low half of a byte holds the first 4
// values of k, the high half the next 4; + 8.
#pragma once

#include "linear/job.h"

namespace mm {

int64_t int8_scratch_bytes(const LinearJob& job);
void int8_prepare(const LinearJob& job, void* scratch, int row0, int row1);
void int8_run(const LinearJob& job, const void* scratch, const Share& share);

// The counterparts of encode_column and decode_one for other layers (linear/codes.h).
void int8_encode(const mm_linear& linear, char* group, int column, const uint8_t* codes, int64_t count, float scale,
                 float min);
uint16_t int8_decode_one(const mm_linear& linear, const char* group, int column, int64_t t);

}  // namespace mm
