// Weights in GGUF's block types. Panels have the file's codes and scales in another order.
//
// A panel of 32 columns is a sequence of blocks along k. A block has `span` values of k:
//     d [32], the factor of the scales: float16, or a byte with an exponent for MXFP4
//     d's companion [32] if the type has one: the factor of the minimums, or the minimums; float16
//     for each step of 32 values of k:
//         for each group of the step: its integer scales [32 bytes], and its integer minimums [32 bytes]
//         the codes, [bits] rows of 32 words, one word for each column
// A weight takes as many bits as in the file, plus padding for K-quants with 6-bit scales.
//
// In a float32 layer, each word has as many whole codes as fit. Neighbouring k are in neighbouring words; after the
// last word, k continues in the next field of the first word. Codes with 3, 5 or 6 bits leave bits 30 and 31 free.
// These bits of several words together hold the last codes (`leftover`). If codes index a table, a word has eight
// codes: the first four in the low halves of its bytes, and the next four in the high halves. The kernels decode a code
// to the float32 weight (d * scale) * (code - offset) - dmin * min, as ggml does. All products in this formula are
// exact in float32.
//
// In a bfloat16 layer, the two halves of a word have the codes of two neighbouring k. A single lookup decodes both
// codes to a pair of bfloat16 numbers. The fields of a word belong to consecutive pairs. The last bits of several
// halves together hold a chunk's last pairs. Q8_0's codes are stored as sign and magnitude. The kernels multiply x with
// code - offset, which is exact in bfloat16, and scale each group's sum in float32. Minimums multiply the group's sum
// of x. AMX kernels scale the numbers before the product instead (linear/blocks_amx.h).
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace mm {

// GGUF's type numbers.
enum BlockType : int32_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kMXFP4 = 39,
};

struct BlockForm {
  int type, bits, group, span, file_bytes;
  int offset;       // subtracted from codes
  int heads;        // bytes of d and its companion for each column
  int scale_bytes;  // bytes of a group's integers for each column
  bool table;       // codes are indices in a table

  constexpr int chunk() const { return bits == 2 || bits == 6 ? 16 : 32; }  // the fewest codes that fill whole words
  constexpr int words() const { return chunk() * bits / 32; }
  constexpr int fields() const { return 32 / bits; }
  constexpr int pair_fields() const { return 16 / bits; }
  constexpr int leftover_bits() const { return 16 % bits; }  // bits of each 16-bit half for a chunk's last pairs
  constexpr int step_scales() const { return 32 / group * scale_bytes * 32; }
  constexpr int step_bytes() const { return step_scales() + bits * 128; }
  constexpr int block_bytes() const { return heads * 32 + span / 32 * step_bytes(); }
};

constexpr int kTableOffset = 128;  // added to table values to make them unsigned

constexpr BlockForm kBlockForms[] = {
    {kQ4_0, 4, 32, 32, 18, 8, 2, 0, false},
    {kQ4_1, 4, 32, 32, 20, 0, 4, 0, false},
    {kQ5_0, 5, 32, 32, 22, 16, 2, 0, false},
    {kQ5_1, 5, 32, 32, 24, 0, 4, 0, false},
    {kQ8_0, 8, 32, 32, 34, 128, 2, 0, false},
    {kQ2_K, 2, 16, 256, 84, 0, 4, 1, false},
    {kQ3_K, 3, 16, 256, 110, 4, 2, 1, false},
    {kQ4_K, 4, 32, 256, 144, 0, 4, 2, false},
    {kQ5_K, 5, 32, 256, 176, 0, 4, 2, false},
    {kQ6_K, 6, 16, 256, 210, 32, 2, 1, false},
    {kIQ4_NL, 4, 32, 32, 18, kTableOffset, 2, 0, true},
    {kIQ4_XS, 4, 32, 256, 136, kTableOffset, 2, 1, true},
    {kMXFP4, 4, 32, 32, 17, 0, 1, 0, true},
};

constexpr BlockForm block_form(int type) {
  for (const BlockForm& form : kBlockForms)
    if (form.type == type) return form;
  return {};
}

constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMXFP4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Return a panel's type, and the panel's offset in the packed weight. `panel` may be the number of panels.
int block_type_of(const mm_linear& linear, int64_t panel);
int64_t block_panel_at(const mm_linear& linear, int64_t panel);

// Packs a column of a panel from a row of the file's blocks.
void block_encode_column(const mm_linear& linear, int type, const uint8_t* row, int column, char* panel);

// Unpacks a column of a panel to k weights, with plain C++: the reference for the kernels.
void block_decode_column(const mm_linear& linear, int type, const char* panel, int column, float* out);

// Decodes values [t, t + count) of k to a float32 panel [count][32]. t and count are multiples of the type's span, or
// multiples of 32 inside a single block.
void block_decode(int type, const char* panel, int64_t t, int64_t count, float* tile);

// Multiplies a row with a panel: c [32] = x [k] * panel.
void block_multiply_row(int type, const char* panel, const float* x, int64_t k, float* c);

// Calls Kernel<TYPE>::run for a panel's type.
template <template <int> class Kernel, class... Values>
void for_block_type(int type, Values... values) {
  switch (type) {
    case kQ4_0: return Kernel<kQ4_0>::run(values...);
    case kQ4_1: return Kernel<kQ4_1>::run(values...);
    case kQ5_0: return Kernel<kQ5_0>::run(values...);
    case kQ5_1: return Kernel<kQ5_1>::run(values...);
    case kQ8_0: return Kernel<kQ8_0>::run(values...);
    case kQ2_K: return Kernel<kQ2_K>::run(values...);
    case kQ3_K: return Kernel<kQ3_K>::run(values...);
    case kQ4_K: return Kernel<kQ4_K>::run(values...);
    case kQ5_K: return Kernel<kQ5_K>::run(values...);
    case kQ6_K: return Kernel<kQ6_K>::run(values...);
    case kIQ4_NL: return Kernel<kIQ4_NL>::run(values...);
    case kIQ4_XS: return Kernel<kIQ4_XS>::run(values...);
    case kMXFP4: return Kernel<kMXFP4>::run(values...);
  }
}

}  // namespace mm
