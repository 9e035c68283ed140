// A register with sixteen floats (AVX-512) or eight (AVX2). With AVX2, GCC would keep 64-byte values in memory.
#pragma once

#include "common/vec.h"

namespace mm {

#if defined(__AVX512F__)
constexpr int kWide = 16;
typedef f16v wide;
typedef h16v wide_half;
#else
constexpr int kWide = 8;
typedef float wide __attribute__((vector_size(32)));
typedef uint16_t wide_half __attribute__((vector_size(16)));  // bfloat16 as bits

// The functions of common/vec.h, for eight values.
MM_INLINE wide fused(wide a, wide b, wide c) { return (wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
MM_INLINE wide widen(wide_half bits) { return (wide)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16); }
MM_INLINE wide_half narrow(wide x) {
  typedef uint32_t ints __attribute__((vector_size(32)));
  return narrow_as<wide_half, ints>(x);
}
MM_INLINE wide round_bf16(wide x) { return widen(narrow(x)); }
MM_INLINE wide exp_clamped(wide x) {
  typedef int32_t ints __attribute__((vector_size(32)));
  return exp_as<ints>(x);
}
MM_INLINE wide silu(wide x) { return x / (1.0f + exp_clamped(-x)); }

// The even and the odd values of eight bfloat16 pairs.
MM_INLINE __m256 even_of(__m256i pair) { return (__m256)_mm256_slli_epi32(pair, 16); }
MM_INLINE __m256 odd_of(__m256i pair) { return (__m256)_mm256_and_si256(pair, _mm256_set1_epi32((int)0xffff0000)); }
#endif

MM_INLINE wide all(float x) { return x - wide{}; }
MM_INLINE wide load_wide(const float* from) { return load_as<wide>(from); }
MM_INLINE wide load_wide(const uint16_t* from) { return widen(load_as<wide_half>(from)); }

}  // namespace mm
