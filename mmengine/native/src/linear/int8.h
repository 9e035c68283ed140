// Weights in whole numbers by rows of x in int8: for layers whose x_form is MM_INT8.
//
// 32 values of x that follow each other share a scale, their largest by 127, and are rounded to it. Products of codes
// are summed exactly, 32 of k at a time, times the scale of x then, and a group's sum times the group's scale, in
// float32; so y is the same bits with every instruction set.
//
// Codes lie [group / 4][32 columns][4 of k], those of int4 [group / 8]: the low half of a byte is of the first 4 of k,
// the high one of the next 4; + 8.
#pragma once

#include "linear/job.h"

namespace mm {

int64_t int8_scratch_bytes(const LinearJob& job);
void int8_prepare(const LinearJob& job, void* scratch, int row0, int row1);
void int8_run(const LinearJob& job, const void* scratch, const Share& share);

// What encode_column and decode_one are to other layers (linear/codes.h).
void int8_encode(const mm_linear& linear, char* group, int column, const uint8_t* codes, int64_t count, float scale,
                 float min);
uint16_t int8_decode_one(const mm_linear& linear, const char* group, int column, int64_t t);

}  // namespace mm
