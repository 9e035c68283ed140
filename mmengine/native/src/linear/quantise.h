// Quantises 32 values of x to integers (linear/int8.h).
#pragma once

#include <immintrin.h>

#include <cmath>

#include "common/vec.h"

namespace mm {

constexpr int kBlock = 32;             // values of x that share a scale
constexpr float kMostWord = 127 * 257;  // the largest code 256 * high + low with two signed bytes

MM_INLINE int32_t largest(__m256i each) {
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}

// Computes the codes of a block of bfloat16 values, and returns their scale: the values are the codes times
// the scale. The largest code is `most`. A block with a non-finite value gets the scale NaN.
MM_INLINE float quantise_block(const uint16_t* x, float most, __m256i (&codes)[4]) {
  __m256 values[4];
  __m256i sizes = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(x + i * 8)), 16);
    sizes = _mm256_max_epi32(sizes, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    values[i] = (__m256)bits;
  }
  const int32_t size = largest(sizes);
  const float amax = _mm_cvtss_f32((__m128)_mm_cvtsi32_si128(size));
  const bool finite = size < 0x7f800000;
  const float inverse = finite && amax > 1e-30f ? most / amax : 0.0f;
  for (int i = 0; i < 4; ++i)
    codes[i] = finite ? _mm256_cvtps_epi32(_mm256_mul_ps(values[i], _mm256_set1_ps(inverse))) : _mm256_setzero_si256();
  return !finite ? NAN : inverse ? amax / most : 0.0f;
}

// Returns 32 codes of one byte.
MM_INLINE __m256i bytes_of(const __m256i (&codes)[4]) {
  const __m256i words[2] = {_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3])};
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]),
                                     _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Divides 32 codes of at most kMostWord into signed bytes: a code is 256 * high + low.
MM_INLINE void split_words(const __m256i (&codes)[4], __m256i& high, __m256i& low) {
  __m256i highs[4], lows[4];
  for (int i = 0; i < 4; ++i) {
    highs[i] = _mm256_srai_epi32(_mm256_add_epi32(codes[i], _mm256_set1_epi32(128)), 8);
    lows[i] = _mm256_sub_epi32(codes[i], _mm256_slli_epi32(highs[i], 8));
  }
  high = bytes_of(highs), low = bytes_of(lows);
}

}  // namespace mm
