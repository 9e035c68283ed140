// One register of floats at a time, sixteen or eight: GCC keeps values of 64 bytes in memory where registers have 32.
#pragma once

#include "row_vec.h"

namespace mm {

#if defined(__AVX512F__)
constexpr int kWide = 16;
typedef f16v wide;
typedef h16v wide_half;
#else
constexpr int kWide = 8;
typedef float wide __attribute__((vector_size(32)));
typedef uint16_t wide_half __attribute__((vector_size(16)));  // bfloat16 as bits

// As linear_vec.h has them of sixteen.
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
#endif

MM_INLINE wide all(float x) { return x - wide{}; }
MM_INLINE wide load_wide(const float* from) { return load_as<wide>(from); }
MM_INLINE wide load_wide(const uint16_t* from) { return widen(load_as<wide_half>(from)); }

template <bool BF16>
MM_INLINE wide load_wide(const char* from, int64_t at) {
  if constexpr (BF16) return load_wide((const uint16_t*)from + at);
  return load_wide((const float*)from + at);
}

template <bool BF16>
MM_INLINE void store_wide(char* to, int64_t at, wide v) {
  if constexpr (BF16)
    store_as(to + at * 2, narrow(v));
  else
    store_as(to + at * 4, v);
}

// The same of the first `count` values, zeros behind them.
template <bool BF16>
MM_INLINE wide load_wide_part(const char* from, int64_t at, int count) {
  constexpr int size = BF16 ? 2 : 4;
  if (count >= kWide) return load_wide<BF16>(from, at);
  alignas(64) char part[64] = {};
  memcpy(part, from + at * size, count * size);
  return load_wide<BF16>(part, 0);
}

template <bool BF16>
MM_INLINE void store_wide_part(char* to, int64_t at, wide v, int count) {
  constexpr int size = BF16 ? 2 : 4;
  if (count >= kWide) return store_wide<BF16>(to, at, v);
  alignas(64) char part[64];
  store_wide<BF16>(part, 0, v);
  memcpy(to + at * size, part, count * size);
}

template <bool BF16>
MM_INLINE wide rounded_wide(wide v) {
  if constexpr (BF16) return round_bf16(v);
  return v;
}

MM_INLINE float sum_wide(wide v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[kWide];
  store_as(lanes, v);
  for (int width = kWide / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

}  // namespace mm
