// Attention products for rows with few queries: q times the keys of four tokens, and softmax weights times values.
// Cache lines of the next tokens are prefetched a few at a time: a core supports few outstanding loads.
#pragma once

#include <immintrin.h>

#include "attention/softmax.h"
#include "attention/tiles.h"
#include "common/wide_vec.h"

namespace mm {

constexpr int kSpan = 64;   // tokens whose scores are in memory at once
constexpr int kTokens = 4;  // tokens per tile of dot products
#if defined(__AVX512F__)
constexpr int kHeads = 4;    // heads that share one load of K
constexpr int kVectors = 8;  // sum registers per head for one or two heads; two use half of all registers
#else
constexpr int kHeads = 2;
constexpr int kVectors = 4;
#endif

// Multiplies K by q. Query: the type of q. kStep: the number of values in a vector of K.
template <class T>
struct Dot {
  using Query = float;
  using Vector = wide;
  static constexpr int kStep = kWide;
  MM_INLINE Vector load(const T* from) { return load_wide(from); }
  MM_INLINE Vector load_part(const T* from, int) { return load_eight(from); }
  MM_INLINE wide add(wide sum, Vector k, const Query* q) { return sum + k * load_wide(q); }
  MM_INLINE Query keep(float value) { return value; }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<uint16_t> {
  using Query = uint16_t;
  using Vector = __m512i;
  static constexpr int kStep = 32;
  MM_INLINE Vector load(const uint16_t* from) { return _mm512_loadu_si512(from); }
  MM_INLINE Vector load_part(const uint16_t* from, int count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1, from);
  }
  MM_INLINE wide add(wide sum, Vector k, const Query* q) {
    return (wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(q), (__m512bh)k);
  }
  MM_INLINE Query keep(float value) { return to_bf16(value); }
};
#endif

// Returns the sum of each of four vectors, as a vector.
MM_INLINE __m128 sum4(const wide* v) {
#if defined(__AVX512F__)
  __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512 all = _mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#else
  __m256 half = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
#endif
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Computes the scores of N heads, which share a KV head, for kTokens keys.
template <int N, class T>
MM_INLINE void score(const T* const* k, int64_t head, const typename Dot<T>::Query* q, int64_t q_width, int d,
                     float* scores) {
  using D = Dot<T>;
  wide sums[N][kTokens] = {};
  typename D::Vector keys[kTokens];
  int i = 0;
  for (; i + D::kStep <= d; i += D::kStep) {
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; t++) keys[t] = D::load(k[t] + head + i);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; t++) sums[n][t] = D::add(sums[n][t], keys[t], q + n * q_width + i);
  }
  if (i < d) {
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; t++) keys[t] = D::load_part(k[t] + head + i, d - i);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; t++) sums[n][t] = D::add(sums[n][t], keys[t], q + n * q_width + i);
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) _mm_storeu_ps(scores + n * kSpan, sum4(sums[n]));
}

// Prefetches the next tokens' cache lines, token by token, in address order.
template <class T>
struct Ahead {
  const T* const* tokens;
  int left;         // remaining tokens
  int64_t bytes;    // bytes per token
  const char *at = nullptr, *end = nullptr;

  MM_INLINE_MEMBER void ask(int64_t lines) {
    while (lines > 0) {
      if (at >= end) {
        if (left-- <= 0) return;
        at = (const char*)*tokens++, end = at + bytes;
      }
      const int64_t here = (end - at + 63) / 64, now = lines < here ? lines : here;
      for (int64_t i = 0; i < now; i++) _mm_prefetch(at + i * 64, _MM_HINT_T1);
      at += now * 64, lines -= now;
    }
  }
};

// sums [G, N registers] = sums * shrink + weights [G, count] v [count, N registers]
template <int G, int N, bool kEight, class T>
MM_INLINE void mix(const T* const* v, int64_t at, int count, const float* weights, const float* shrink, float* sums,
                   int64_t width, Ahead<T>& ahead, int lines) {
  wide sum[G][N];
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sum[g][j] = load_wide(sums + g * width + j * kWide) * shrink[g];
  for (int t = 0; t < count; t++) {
    ahead.ask(lines);
    wide weight[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) weight[g] = all(weights[g * kSpan + t]);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      wide value = kEight ? load_eight(v[t] + at) : load_wide(v[t] + at + j * kWide);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) sum[g][j] += weight[g] * value;
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) store_as(sums + g * width + j * kWide, sum[g][j]);
}

// Returns the number of V's values per head that fit into the sum registers of `heads` heads.
constexpr int values_at_once(int heads) { return (heads > 2 ? kVectors / 2 : kVectors) * kWide; }

template <int G, class T>
void mix_heads(const T* const* v, int64_t head, int d, int count, const float* weights, const float* shrink,
               float* sums, int64_t width, Ahead<T>& ahead, int lines) {
  constexpr int kMost = values_at_once(G) / kWide, kHalf = kMost / 2;
  int i = 0;
  for (; i + kMost * kWide <= d; i += kMost * kWide)
    mix<G, kMost, false>(v, head + i, count, weights, shrink, sums + i, width, ahead, lines);
  if (i + kHalf * kWide <= d) {
    mix<G, kHalf, false>(v, head + i, count, weights, shrink, sums + i, width, ahead, lines);
    i += kHalf * kWide;
  }
  for (; i + kWide <= d; i += kWide)
    mix<G, 1, false>(v, head + i, count, weights, shrink, sums + i, width, ahead, lines);
  if (i < d) mix<G, 1, true>(v, head + i, count, weights, shrink, sums + i, width, ahead, lines);
}

}  // namespace mm
