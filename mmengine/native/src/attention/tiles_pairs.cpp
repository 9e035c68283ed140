// Attention tiles of bfloat16 pairs: packing and softmax, and for CPUs without AMX the products (vdpbf16ps).
#if defined(__AVX512BF16__)
#include <immintrin.h>

#include "attention/tiles.h"

namespace mm {
namespace {

constexpr int kRows = PairTiles::kRows;

MM_INLINE __m512i load_pairs(const uint16_t* from, int count) {
  return count >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

// Interleaves sixteen values of two keys: the first of each, then the second of each, and so on.
MM_INLINE __m512i interleave(const uint16_t* first, const uint16_t* second, int count) {
  const __mmask16 some = count >= 16 ? 0xffff : (1u << count) - 1;
  __m256i low = first ? _mm256_maskz_loadu_epi16(some, first) : _mm256_setzero_si256();
  __m256i high = second ? _mm256_maskz_loadu_epi16(some, second) : _mm256_setzero_si256();
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

#if !defined(__AMX_BF16__)
constexpr int kVectors = 4;  // each holds 16 sums of a row

// Adds to sums[r][j], for each p: pair p in the row at a + r * row, times the 16 pairs at b + j * vector + p * 32.
template <int N>
MM_INLINE void add_pairs(const uint16_t* a, int64_t row, const uint16_t* b, int64_t vector, int pairs,
                         __m512 (&sums)[kRows][N]) {
  for (int pair = 0; pair < pairs; ++pair) {
    __m512bh right[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) right[j] = (__m512bh)load_as<__m512i>(b + j * vector + pair * 32);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512bh left = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(a + r * row + pair * 2));
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[r][j] = _mm512_dpbf16_ps(sums[r][j], left, right[j]);
    }
  }
}

// Stores the sums to `to` [kRows, N * 16].
template <int N>
MM_INLINE void store_sums(const __m512 (&sums)[kRows][N], float* to, int64_t row) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) _mm512_storeu_ps(to + r * row + j * 16, sums[r][j]);
}

// Computes the scores of N * 16 keys, whose d values are divided into steps of 32.
template <int N>
void score_keys(const uint16_t* q, const uint16_t* keys, int d, int steps, int64_t tile, float* scores) {
  __m512 sums[kRows][N] = {};
  for (int s = 0; s < steps; ++s) {
    const int left = (d + 1) / 2 - s * 16;
    add_pairs<N>(q + s * 32, steps * 32, keys + s * tile, steps * tile, left < 16 ? left : 16, sums);
  }
  store_sums<N>(sums, scores, kScoresStride);
}

// For N panels of 16 values: to [kRows, width] = weights * values, added to the old sums unless `first`.
template <int N>
void mix_panels(const uint16_t* weights, int64_t row, const uint16_t* values, int64_t block, int64_t tile, int count,
                bool first, float* to, int64_t width) {
  __m512 sums[kRows][N] = {};
  if (!first)
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[r][j] = _mm512_loadu_ps(to + r * width + j * 16);
  for (int key = 0; key < count; key += 32, values += block) add_pairs<N>(weights + key, row, values, tile, 16, sums);
  store_sums<N>(sums, to, width);
}
#endif

}  // namespace

PairTiles::PairTiles(Carver& carver, int head_dim, int value_dim)
    : d_(head_dim),
      value_dim_(value_dim),
      steps_((int)round_up(head_dim, 32) / 32),
      panels_((int)round_up(value_dim, 16) / 16) {
  keys_ = carver.take<uint16_t>(kKeyBlock * steps_ * 32);
  values_ = carver.take<uint16_t>(kKeyBlock * panels_ * 16);
  scores_ = carver.take<float>(kRows * kScoresStride);
  weights_ = carver.take<uint16_t>(kRows * kWeightsStride);
}

void PairTiles::pack_query(const uint16_t* from, uint16_t* to) const {
  for (int i = 0; i < d_; i += 32) _mm512_storeu_si512(to + i, load_pairs(from + i, d_ - i));
}

void PairTiles::pack(int at, const uint16_t* const* keys, const uint16_t* const* values, int count) const {
  for (int step = 0; step < steps_; step++) {
    f16v m[16] = {};
    for (int r = 0; r < 16 && r < count; r++) m[r] = (f16v)load_pairs(keys[r] + step * 32, d_ - step * 32);
    transpose16(m);
    uint16_t* to = keys_ + ((int64_t)at / 16 * steps_ + step) * kTile;
    for (int i = 0; i < 16; i++) store_as(to + i * 32, m[i]);
  }
  uint16_t* to = values_ + (int64_t)at / 32 * panels_ * kTile + at % 32 * 16;
  for (int r = 0; r < 16; r += 2)
    for (int panel = 0; panel < panels_; panel++) {
      const uint16_t* first = r < count ? values[r] + panel * 16 : nullptr;
      const uint16_t* second = r + 1 < count ? values[r + 1] + panel * 16 : nullptr;
      _mm512_storeu_si512(to + panel * kTile + r * 16, interleave(first, second, value_dim_ - panel * 16));
    }
}

void PairTiles::attend(const QueryTile<uint16_t>& tile, int start, int from, int count, const Scoring& scoring) const {
  const int width = panels_ * 16;
  const bool begins = tile.begins(start);
  score(tile.q, from, count);
  for (int r = 0; r < kRows; r++) {
    uint16_t* weights = weights_ + r * kWeightsStride;
    float shrink = weigh(
        scores_ + r * kScoresStride, from, tile.first[r] - start, tile.seen[r] - start, count, 32, scoring,
        tile.softmax[r], tile.begins(start, r),
        [=](int at, f16v weight) { store_as(weights + at, (h16v)_mm512_cvtneps_pbh((__m512)weight)); });
    if (begins || shrink == 1.0f) continue;
    for (int i = 0; i < width; i++) tile.sums[r * width + i] *= shrink;
  }
  mix(from, count, begins, tile.sums);
}

#if !defined(__AMX_BF16__)
void PairTiles::begin() const {}
void PairTiles::end() const {}

void PairTiles::score(const uint16_t* q, int from, int count) const {
  constexpr decltype(&score_keys<1>) some[] = {nullptr, score_keys<1>, score_keys<2>, score_keys<3>, score_keys<4>};
  for (int key = from; key < count; key += kVectors * 16) {
    const int left = (int)round_up(count - key, 16) / 16;
    some[left < kVectors ? left : kVectors](q, keys_ + (int64_t)key / 16 * steps_ * kTile, d_, steps_, kTile,
                                            scores_ + key);
  }
}

void PairTiles::mix(int from, int count, bool begins, float* sums) const {
  const uint16_t* values = values_ + (int64_t)from / 32 * panels_ * kTile;
  constexpr decltype(&mix_panels<1>) some[] = {nullptr, mix_panels<1>, mix_panels<2>, mix_panels<3>, mix_panels<4>};
  for (int panel = 0; panel < panels_; panel += kVectors) {
    const int left = panels_ - panel;
    some[left < kVectors ? left : kVectors](weights_ + from, kWeightsStride, values + (int64_t)panel * kTile,
                                            (int64_t)panels_ * kTile, kTile, count - from, begins, sums + panel * 16,
                                            width());
  }
}
#endif

}  // namespace mm
#endif
