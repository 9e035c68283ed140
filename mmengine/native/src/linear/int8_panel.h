// Multiplies a few quantised rows of x with a panel of codes (linear/int8.h).
#pragma once

#include <immintrin.h>

#include "common/fetch.h"
#include "common/vec.h"
#include "linear/job.h"
#include "linear/quantise.h"

namespace mm {

// The layout of a row in scratch: the row's codes; a scale for each block; the sum of the codes of each block; and for
// each group the sum of the values that the codes encode. 16-bit codes take two rows of bytes: the high bytes with the
// scales, and the low bytes.
struct Row {
  int64_t k, blocks, groups, stride;
  int width;  // rows of bytes for a row of x

  explicit Row(const LinearJob& job)
      : k((int64_t)job.steps() * kStep),
        blocks(k / kBlock),
        groups(job.groups()),
        width(job.linear->x_form == MM_INT16 ? 2 : 1) {
    // The extra cache line keeps rows from all mapping to the same cache set.
    stride = ceil_div(k + blocks * 8 + groups * 4, 64) * 64 + 64;
  }
  int8_t* codes(char* row) const { return (int8_t*)row; }
  float* scales(char* row) const { return (float*)(row + k); }
  int32_t* sums(char* row) const { return (int32_t*)(row + k + blocks * 4); }
  float* group_sums(char* row) const { return (float*)(row + k + blocks * 8); }
};

#if defined(__AVX512VNNI__)
constexpr int kTall = 6;  // rows that are multiplied at once
constexpr bool kUnsigned = true;  // whether codes of x are stored unsigned for int8 weights

MM_INLINE __m512i four(const int8_t* codes) { return _mm512_set1_epi32(load_as<int32_t>(codes)); }

// Computes the sums of a block's products, for M rows and the panel's columns. With int8 weights, codes of x are stored
// as code + 128, because one operand of vpdpbusd is unsigned. The excess, 128 times the sum of the weights, is computed
// with the same instruction and subtracted. `fetch`: whether to prefetch later weights.
template <int M>
MM_INLINE void multiply_int8(const int8_t* x, int64_t stride, const char* at, bool fetch, __m512i (&sums)[M][2]) {
  __m512i more[2] = {};
#pragma GCC unroll 8
  for (int quad = 0; quad < kBlock / 4; ++quad, at += 128) {
    if (fetch) fetch_ahead<16384, 1024>(at), fetch_ahead<16384, 1024>(at + 64);
    const __m512i codes[2] = {load_as<__m512i>(at), load_as<__m512i>(at + 64)};
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) more[v] = _mm512_dpbusd_epi32(more[v], _mm512_set1_epi8((char)0x80), codes[v]);
#pragma GCC unroll 12
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        sums[i][v] = _mm512_dpbusd_epi32(sums[i][v], four(x + i * stride + quad * 4), codes[v]);
  }
#pragma GCC unroll 12
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) sums[i][v] = _mm512_sub_epi32(sums[i][v], more[v]);
}

template <int M>
MM_INLINE void multiply_int4(const int8_t* x, int64_t stride, const char* at, bool, __m512i (&sums)[M][2]) {
  const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int eight = 0; eight < kBlock / 8; ++eight, at += 128) {
    const __m512i both[2] = {load_as<__m512i>(at), load_as<__m512i>(at + 64)};
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      __m512i codes[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) codes[v] = _mm512_and_si512(part ? _mm512_srli_epi16(both[v], 4) : both[v], low);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
          sums[i][v] = _mm512_dpbusd_epi32(sums[i][v], codes[v], four(x + i * stride + eight * 8 + part * 4));
    }
  }
}

// Returns the sums of a row of x, whose codes have WIDTH bytes.
template <int WIDTH>
MM_INLINE __m512 sums_of(const __m512i (*sums)[2], int v) {
  if constexpr (WIDTH == 1) return _mm512_cvtepi32_ps(sums[0][v]);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sums[0][v], 8), sums[WIDTH - 1][v]));
}

// Computes c [M, 32], the product of M rows and a panel. WIDTH: bytes of a code of x.
template <bool INT4, int WIDTH, int M>
void multiply_panel(const mm_linear& linear, const Row& row, char* rows, const char* group, float* c) {
  __m512 totals[M][2] = {};
  for (int64_t g = 0, block = 0; g < row.groups; ++g, group += group_bytes(linear)) {
    __m512 parts[M][2] = {};
    const char* at = group + codes_at(linear);
    for (int in = 0; in < linear.group; in += kBlock, ++block, at += kBlock * (INT4 ? 16 : 32)) {
      __m512i sums[M * WIDTH][2];
#pragma GCC unroll 12
      for (int i = 0; i < M * WIDTH; ++i)
        sums[i][0] = sums[i][1] = _mm512_set1_epi32(INT4 ? -8 * row.sums(rows + i * row.stride)[block] : 0);
      (INT4 ? multiply_int4<M * WIDTH> : multiply_int8<M * WIDTH>)(row.codes(rows) + block * kBlock, row.stride, at,
                                                                   WIDTH > 1 && !kIsAmd, sums);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const __m512 scale = _mm512_set1_ps(row.scales(rows + i * WIDTH * row.stride)[block]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
          parts[i][v] = _mm512_fmadd_ps(sums_of<WIDTH>(sums + i * WIDTH, v), scale, parts[i][v]);
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m512 scale = _mm512_cvtph_ps(load_as<__m256i>(group + v * 32));
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) totals[i][v] = _mm512_fmadd_ps(parts[i][v], scale, totals[i][v]);
      if (!linear.mins) continue;
      const __m512 min = load_as<__m512>(group + mins_at(linear) + v * 64);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const __m512 sum = _mm512_set1_ps(row.group_sums(rows + i * row.stride)[g]);
        totals[i][v] = _mm512_fmadd_ps(sum, min, totals[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) store_as(c + i * kPanel + v * 16, totals[i][v]);
}
#else
constexpr int kTall = 4;
constexpr bool kUnsigned = false;

// Adds to each sum the products of 4 neighbouring bytes; the bytes of a are unsigned.
MM_INLINE __m256i add_products(__m256i sums, __m256i a, __m256i b) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}

MM_INLINE __m256i four(const int8_t* codes) { return _mm256_set1_epi32(load_as<int32_t>(codes)); }

// Computes the sums of a block's products, for M rows and 8 * V columns. x and `at` are the block's codes of the first
// row and the first column. Not inlined, so that no other value occupies registers.
template <int M, int V>
__attribute__((noinline)) void multiply_int8(const int8_t* x, int64_t stride, const char* at, __m256i (&found)[M][V]) {
  __m256i sums[M][V] = {};
#pragma GCC unroll 8
  for (int quad = 0; quad < kBlock / 4; ++quad, at += 128) {
    __m256i codes[V], sizes[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) codes[v] = load_as<__m256i>(at + v * 32), sizes[v] = _mm256_abs_epi8(codes[v]);
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) {
      const __m256i values = four(x + i * stride + quad * 4);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[i][v] = add_products(sums[i][v], sizes[v], _mm256_sign_epi8(values, codes[v]));
    }
  }
  memcpy(found, sums, sizeof sums);
}

// Like multiply_int8, for int4 codes. Sums are kept in 16 bits, which suffices for eight sums of two products of at
// most 15 * 127.
template <int M, int V>
__attribute__((noinline)) void multiply_int4(const int8_t* x, int64_t stride, const char* at, __m256i (&found)[M][V]) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i sums[M][V] = {};
#pragma GCC unroll 8
  for (int eight = 0; eight < kBlock / 8; ++eight, at += 128)
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      __m256i codes[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        codes[v] = load_as<__m256i>(at + v * 32);
        codes[v] = _mm256_and_si256(part ? _mm256_srli_epi16(codes[v], 4) : codes[v], low);
      }
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) {
        const __m256i values = four(x + i * stride + eight * 8 + part * 4);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[i][v] = _mm256_add_epi16(sums[i][v], _mm256_maddubs_epi16(codes[v], values));
      }
    }
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < V; ++v) sums[i][v] = _mm256_madd_epi16(sums[i][v], _mm256_set1_epi16(1));
  memcpy(found, sums, sizeof sums);
}

// Computes 8 * V columns of c [M, 32], from `column` on: the product of M rows and a panel.
template <bool INT4, int M, int V>
void multiply(const mm_linear& linear, const Row& row, char* rows, const char* group, int column, float* c) {
  __m256 totals[M][V] = {};
  const int64_t group_size = group_bytes(linear), codes = codes_at(linear) + column * 4;
  for (int64_t g = 0, block = 0; g < row.groups; ++g, group += group_size) {
    __m256 parts[M][V] = {};
    const char* at = group + codes;
    for (int in = 0; in < linear.group; in += kBlock, ++block, at += kBlock * (INT4 ? 16 : 32)) {
      __m256i sums[M][V];
      (INT4 ? multiply_int4<M, V> : multiply_int8<M, V>)(row.codes(rows) + block * kBlock, row.stride, at, sums);
      for (int i = 0; i < M; ++i) {
        char* of = rows + i * row.stride;
        const __m256 scale = _mm256_broadcast_ss(row.scales(of) + block);
        const __m256i eights = _mm256_set1_epi32(INT4 ? 8 * row.sums(of)[block] : 0);
        for (int v = 0; v < V; ++v)
          parts[i][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(sums[i][v], eights)), scale, parts[i][v]);
      }
    }
    for (int v = 0; v < V; ++v) {
      const __m256 scale = _mm256_cvtph_ps(load_as<__m128i>(group + (column + v * 8) * 2));
      for (int i = 0; i < M; ++i) totals[i][v] = _mm256_fmadd_ps(parts[i][v], scale, totals[i][v]);
      if (!linear.mins) continue;
      const __m256 min = load_as<__m256>(group + mins_at(linear) + (column + v * 8) * 4);
      for (int i = 0; i < M; ++i) {
        const __m256 sum = _mm256_broadcast_ss(row.group_sums(rows + i * row.stride) + g);
        totals[i][v] = _mm256_fmadd_ps(sum, min, totals[i][v]);
      }
    }
  }
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < V; ++v) store_as(c + i * kPanel + column + v * 8, totals[i][v]);
}

// Computes c [M, 32]. One row is multiplied with the whole panel, several rows with one half after the other, so that
// the sums fit into registers.
template <bool INT4, int, int M>
void multiply_panel(const mm_linear& linear, const Row& row, char* rows, const char* panel, float* c) {
  if constexpr (M == 1) {
    multiply<INT4, 1, 4>(linear, row, rows, panel, 0, c);
  } else {
    multiply<INT4, M, 2>(linear, row, rows, panel, 0, c);
    multiply<INT4, M, 2>(linear, row, rows, panel, 16, c);
  }
}
#endif

}  // namespace mm
