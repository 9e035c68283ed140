// FP8 weights of a panel to bfloat16.
//
// The codes of a group lie [group / 4][2 halves][4][2 pairs of k][4 columns][2]: a half of two pairs is a cache
// line, whose bytes interleave to what bfloat16 has (linear_job.h).
#pragma once

#include <immintrin.h>

#include "linear_job.h"
#include "linear_vec.h"

namespace mm {

constexpr int kFp8Ahead = 512;  // bytes that are asked for ahead

// Where the code of a column at t lies among those of its group.
inline int64_t place_fp8(int column, int64_t t) {
  return t / 4 * 128 + column / 16 * 64 + column % 16 / 4 * 16 + t / 2 % 2 * 8 + column % 4 * 2 + t % 2;
}

// A group, scales before codes, as `size` / 32 steps of bfloat16.
void fp8_decode(const char* group, int size, char* out);

// One value of it.
uint16_t fp8_decode_one(const char* group, int column, int64_t t);

#if defined(__AVX512VBMI__)
// What the 128 codes without a sign stand for; which bytes of a vector are low ones of bfloat16, and high ones.
struct Fp8Values {
  alignas(64) float of[128];
  alignas(64) uint8_t even[64], odd[64];
  Fp8Values();
  static const Fp8Values all;
};

// The 128 codes times a scale as bfloat16: high and low bytes.
struct Fp8Table {
  __m512i high[2], low[2];

  MM_INLINE_MEMBER explicit Fp8Table(__m512 scale) {
    const Fp8Values& values = Fp8Values::all;
    __m512i even = load_as<__m512i>(values.even), odd = load_as<__m512i>(values.odd);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m512 v[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) v[j] = _mm512_mul_ps(load_as<__m512>(values.of + i * 64 + j * 16), scale);
      __m512i first = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]), second = (__m512i)_mm512_cvtne2ps_pbh(v[3], v[2]);
      low[i] = _mm512_permutex2var_epi8(first, even, second);
      high[i] = _mm512_permutex2var_epi8(first, odd, second);
    }
  }

  // 16 columns of two pairs of k.
  MM_INLINE_MEMBER void decode(const char* codes, __m512i& first, __m512i& second) const {
    __builtin_prefetch(codes + kFp8Ahead, 0, 2);
    __m512i code = load_as<__m512i>(codes);
    __m512i below = _mm512_permutex2var_epi8(low[0], code, low[1]);
    __m512i above = _mm512_permutex2var_epi8(high[0], code, high[1]);
    above = _mm512_ternarylogic_epi32(above, code, _mm512_set1_epi8((char)0x80), 0xf8);  // or the sign
    first = _mm512_unpacklo_epi8(below, above);
    second = _mm512_unpackhi_epi8(below, above);
  }
};

// Of a group in which 16 columns share a scale, as the blocks of a file give them.
struct Fp8Tables {
  Fp8Table of[2];

  MM_INLINE_MEMBER explicit Fp8Tables(const char* group)
      : of{Fp8Table(_mm512_set1_ps(load_as<float>(group))), Fp8Table(_mm512_set1_ps(load_as<float>(group + 64)))} {}

  MM_INLINE_MEMBER static bool fit(const char* group) {
    __m512 left = load_as<__m512>(group), right = load_as<__m512>(group + 64);
    return _mm512_cmpeq_ps_mask(left, _mm512_set1_ps(left[0])) == 0xffff &&
           _mm512_cmpeq_ps_mask(right, _mm512_set1_ps(right[0])) == 0xffff;
  }
};
#endif

}  // namespace mm
