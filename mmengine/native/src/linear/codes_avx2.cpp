// Encodes and decodes single codes of a panel for AVX2.
#include "linear/codes.h"

#if !defined(__AVX512F__)

#include "linear/codes_avx2.h"

namespace mm {
namespace {

int64_t place_fp8(int column, int64_t t) {
  return t / 4 * 128 + column / 4 * 16 + t / 2 % 2 * 8 + column % 4 * 2 + t % 2;
}
int64_t place_int8(int column, int64_t t) { return t / 4 * 128 + column / 8 * 32 + t % 4 * 8 + column % 8; }
int64_t place_int4(int column, int64_t t) {
  return t / 4 * 64 + column / 16 * 32 + column / 4 % 2 * 16 + column / 8 % 2 * 8 + column % 4 * 2 + t % 2;
}
int shift_int4(int64_t t) { return t / 2 % 2 * 4; }

// Stores a column's FP8 codes and its scale's magnitude; the scale's sign moves to the codes. The sign bit that is
// already stored in the scale's place is kept, because it may mark odd codes of another column (linear/codes_avx2.h).
// Codes from `count` on need no value, because x is zero there.
void encode_fp8(char* group, int size, int column, const uint8_t* codes, int64_t count, float scale) {
  uint32_t bits, known;
  memcpy(&bits, &scale, 4);
  memcpy(&known, group + column * 4, 4);
  store_as(group + column * 4, (bits & 0x7fffffffu) | (known & 0x80000000u));
  for (int64_t t = 0; t < count; ++t) {
    const uint8_t stored = stored_fp8(codes[t]) ^ (bits >> 24 & 0x80);
    group[kPanel * 4 + place_fp8(column, t)] = (char)stored;
    if (is_odd(stored)) group[odd_place(size, t) * 4 + 3] |= (char)0x80;
  }
}

}  // namespace

void encode_column(const mm_linear& linear, char* group, int column, const uint8_t* codes, int64_t count, float scale,
                   float min) {
  if (linear.form == MM_FP8) return encode_fp8(group, linear.group, column, codes, count, scale);
  uint8_t* to = (uint8_t*)group + codes_at(linear);
  for (int64_t t = 0; t < count; ++t)
    if (linear.form == MM_INT4)
      to[place_int4(column, t)] |= ((codes[t] + 8) & 15) << shift_int4(t);
    else
      to[place_int8(column, t)] = codes[t];
  store_as(group + column * 2, (uint16_t)_cvtss_sh(scale, 0));
  if (linear.mins) store_as(group + mins_at(linear) + column * 4, min);
}

float decode_one(const mm_linear& linear, const char* group, int column, int64_t t) {
  const char* codes = group + codes_at(linear);
  if (linear.form == MM_FP8) {
    __m256i pairs[2];
    Fp8Codes::exact(codes + t / 4 * 128 + column / 8 * 32, (const float*)group + column / 8 * 8, pairs);
    uint16_t found[16];
    store_as(found, pairs[t / 2 % 2]);
    return widen(h16v{found[column % 8 * 2 + t % 2]})[0];
  }
  const Scales by(linear, group);
  float value = (int8_t)codes[place_int8(column, t)];
  if (linear.form == MM_INT4) value = (float)(((uint8_t)codes[place_int4(column, t)] >> shift_int4(t) & 15) - 8);
  return fused(splat(value), by.scales[column / 16], by.mins[column / 16])[column % 16];
}

}  // namespace mm

#endif
