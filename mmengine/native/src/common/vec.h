// Sixteen floats as one value (one AVX-512 register, two of AVX2), with the compiler's vector types.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace mm {

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h16v __attribute__((vector_size(32)));  // bfloat16 as bits

#define MM_INLINE static inline __attribute__((always_inline))
#define MM_INLINE_MEMBER inline __attribute__((always_inline))

template <class V>
MM_INLINE V load_as(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
MM_INLINE void store_as(void* to, V v) {
  memcpy(to, &v, sizeof v);
}

MM_INLINE f16v splat(float x) { return x - f16v{}; }

// a * b + c, rounded once. The compiler fuses the plain operators only in some contexts.
MM_INLINE f16v fused(f16v a, f16v b, f16v c) {
#if defined(__AVX512F__)
  return (f16v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  struct Halves {
    __m256 low, high;
  } x = load_as<Halves>(&a), y = load_as<Halves>(&b), z = load_as<Halves>(&c);
  x = {_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
  return load_as<f16v>(&x);
#endif
}

MM_INLINE f16v widen(h16v bits) {
#if defined(__AVX512F__)
  return (f16v)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#else
  return (f16v)(__builtin_convertvector(bits, u16v) << 16);
#endif
}

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN. With AVX512_BF16, narrow() makes values below 2^-126
// zero.
template <class Half, class Ints, class Floats>
MM_INLINE Half narrow_as(Floats x) {
  Ints bits = (Ints)x;
  Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
  Ints kept = (Ints)(x == x) & rounded;
  Ints nan = ~(Ints)(x == x) & (bits | 0x400000);
  return __builtin_convertvector((kept | nan) >> 16, Half);
}

MM_INLINE h16v narrow(f16v x) {
#if defined(__AVX512BF16__)
  return (h16v)_mm512_cvtneps_pbh((__m512)x);
#else
  return narrow_as<h16v, u16v>(x);
#endif
}

MM_INLINE f16v round_bf16(f16v x) { return widen(narrow(x)); }

// e^x for x in [-87, 88], clamped outside; the relative error is below 2e-7. NaN stays NaN. Cody and Waite's reduction
// by ln 2 in two parts, then the Taylor polynomial of degree 7 on |r| < 0.35.
template <class Ints, class Floats>
MM_INLINE Floats exp_as(Floats x) {
  x = x > 88.0f ? 88.0f - Floats{} : x;
  x = x < -87.0f ? -87.0f - Floats{} : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  Floats shifted = x * 1.44269504f + magic;
  Floats whole = shifted - magic;
  Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats p = 1.0f / 5040 - Floats{};
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

MM_INLINE f16v exp_clamped(f16v x) { return exp_as<i16v>(x); }

MM_INLINE f16v silu(f16v x) { return x / (1.0f + exp_clamped(-x)); }

}  // namespace mm
