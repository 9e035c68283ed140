#include "linear_int8.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "linear_vec.h"

namespace mm {
namespace {

constexpr int kBlock = 32;  // values of x that share a scale
constexpr int kTall = 4;    // rows that are multiplied at once

// Of a row in scratch: its codes, then for each block a scale and the sum of its codes, and for each group the sum of
// what its codes stand for.
struct Row {
  int64_t k, blocks, groups, stride;

  explicit Row(const LinearJob& job) : k((int64_t)job.steps() * kStep), blocks(k / kBlock), groups(job.groups()) {
    stride = ceil_div(k + blocks * 8 + groups * 4, 64) * 64 + 64;  // rows do not all stand in one set of the cache
  }
  int8_t* codes(char* row) const { return (int8_t*)row; }
  float* scales(char* row) const { return (float*)(row + k); }
  int32_t* sums(char* row) const { return (int32_t*)(row + k + blocks * 4); }
  float* group_sums(char* row) const { return (float*)(row + k + blocks * 8); }
};

MM_INLINE int32_t largest(__m256i each) {
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}

// 32 of bfloat16. A block with a value that is not finite has a scale that is not.
void quantise(const uint16_t* x, int8_t* codes, float* scale, int32_t* sum) {
  __m256 values[4];
  __m256i most = _mm256_setzero_si256(), whole[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(x + i * 8)), 16);
    most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    values[i] = (__m256)bits;
  }
  const int32_t size = largest(most);
  const float amax = _mm_cvtss_f32((__m128)_mm_cvtsi32_si128(size));
  const bool finite = size < 0x7f800000;
  const float inverse = finite && amax > 1e-30f ? 127.0f / amax : 0.0f;
  *scale = !finite ? NAN : inverse ? amax / 127.0f : 0.0f;
  for (int i = 0; i < 4; ++i)
    whole[i] = finite ? _mm256_cvtps_epi32(_mm256_mul_ps(values[i], _mm256_set1_ps(inverse))) : _mm256_setzero_si256();
  const __m256i words[2] = {_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3])};
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  store_as(codes, bytes);
  const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
  const __m128i twos = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  const __m128i pairs = _mm_add_epi32(twos, _mm_shuffle_epi32(twos, 0x4e));
  *sum = _mm_cvtsi128_si32(_mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0xb1)));
}

void quantise_row(const LinearJob& job, const Row& row, const uint16_t* x, char* to) {
  const int64_t k = job.linear->k, in_group = job.linear->group / kBlock;
  for (int64_t i = 0; i < row.blocks; ++i) {
    uint16_t part[kBlock] = {};
    const int64_t left = k - i * kBlock;
    if (left > 0 && left < kBlock) memcpy(part, x + i * kBlock, left * 2);
    quantise(left < kBlock ? part : x + i * kBlock, row.codes(to) + i * kBlock, row.scales(to) + i, row.sums(to) + i);
  }
  for (int64_t group = 0; group < row.groups; ++group) {
    float sum = 0;
    for (int64_t i = group * in_group; i < (group + 1) * in_group; ++i)
      sum += row.scales(to)[i] * (float)row.sums(to)[i];
    row.group_sums(to)[group] = sum;
  }
}

// sums + those of products of 4 neighbours each, a without a sign.
MM_INLINE __m256i add_products(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}

MM_INLINE __m256i four(const int8_t* codes) { return _mm256_set1_epi32(load_as<int32_t>(codes)); }

// Sums of a block's products, of M rows and 8 * V columns; x and `at`: the block's codes of the first row, and of the
// first column. Functions of their own, so that nothing else is in registers.
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

// Eight sums of two products of at most 15 * 127 fit into 16 bits.
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
        for (int v = 0; v < V; ++v)
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
          sums[i][v] = _mm256_dpbusd_epi32(sums[i][v], codes[v], values);
#else
          sums[i][v] = _mm256_add_epi16(sums[i][v], _mm256_maddubs_epi16(codes[v], values));
#endif
      }
    }
#if !defined(__AVX512VNNI__) || !defined(__AVX512VL__)
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < V; ++v) sums[i][v] = _mm256_madd_epi16(sums[i][v], _mm256_set1_epi16(1));
#endif
  memcpy(found, sums, sizeof sums);
}

// c [M, 32] from `column` on, of M rows by a panel.
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

// One row by the whole panel, more of them by its halves: their sums are in registers.
template <bool INT4, int M>
void multiply_panel(const mm_linear& linear, const Row& row, char* rows, const char* panel, float* c) {
  if constexpr (M == 1) {
    multiply<INT4, 1, 4>(linear, row, rows, panel, 0, c);
  } else {
    multiply<INT4, M, 2>(linear, row, rows, panel, 0, c);
    multiply<INT4, M, 2>(linear, row, rows, panel, 16, c);
  }
}

template <bool INT4>
constexpr decltype(&multiply_panel<INT4, 1>) kPanels[] = {nullptr, multiply_panel<INT4, 1>, multiply_panel<INT4, 2>,
                                                          multiply_panel<INT4, 3>, multiply_panel<INT4, 4>};

int64_t place(const mm_linear& linear, int column, int64_t t) {
  return t / (linear.form == MM_INT4 ? 8 : 4) * 128 + column * 4 + t % 4;
}
int shift(int64_t t) { return t / 4 % 2 * 4; }

}  // namespace

int64_t int8_scratch_bytes(const LinearJob& job) { return job.m * Row(job).stride; }

void int8_prepare(const LinearJob& job, void* scratch, int row0, int row1) {
  const Row row(job);
  for (int i = row0; i < row1; ++i)
    quantise_row(job, row, (const uint16_t*)job.row(i), (char*)scratch + i * row.stride);
}

void int8_run(const LinearJob& job, const void* scratch, const Share& share) {
  const Row row(job);
  alignas(64) float c[kTall * kPanel];
  for (int panel = share.panel0; panel < share.panel1; ++panel)
    for (int first = share.row0, count; first < share.row1; first += count) {
      count = share.row1 - first < kTall ? share.row1 - first : kTall;
      const auto run = job.linear->form == MM_INT4 ? kPanels<true>[count] : kPanels<false>[count];
      run(*job.linear, row, (char*)scratch + first * row.stride, job.panel(panel), c);
      linear_store(job, c, kPanel, first, count, panel);
    }
}

void int8_encode(const mm_linear& linear, char* group, int column, const uint8_t* codes, int64_t count, float scale,
                 float min) {
  uint8_t* to = (uint8_t*)group + codes_at(linear);
  for (int64_t t = 0; t < count; ++t)
    if (linear.form == MM_INT4)
      to[place(linear, column, t)] |= ((codes[t] + 8) & 15) << shift(t);
    else
      to[place(linear, column, t)] = codes[t];
  store_as(group + column * 2, (uint16_t)_cvtss_sh(scale, 0));
  if (linear.mins) store_as(group + mins_at(linear) + column * 4, min);
}

uint16_t int8_decode_one(const mm_linear& linear, const char* group, int column, int64_t t) {
  const uint8_t code = (uint8_t)group[codes_at(linear) + place(linear, column, t)];
  const float value = linear.form == MM_INT4 ? (float)((code >> shift(t) & 15) - 8) : (float)(int8_t)code;
  const float scale = _cvtsh_ss(load_as<uint16_t>(group + column * 2));
  const float min = linear.mins ? load_as<float>(group + mins_at(linear) + column * 4) : 0.0f;
  return narrow(fused(splat(value), splat(scale), splat(min)))[0];
}

}  // namespace mm
