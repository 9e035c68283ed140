// Multiplies a few rows with a bfloat16 panel on CPUs with AVX-512 but without AMX. Uses vdpbf16ps, or float32 FMAs if
// the CPU lacks vdpbf16ps. Both paths sum over k in order, so a row's result has the same bits in any batch.
#pragma once

#include <type_traits>

#include "common/fetch.h"
#include "common/vec.h"
#include "linear/codes.h"
#include "linear/rows.h"

namespace mm {

// Initialises M rows' sums for a panel: zeros if `first`, else the values in c.
template <int M>
MM_INLINE void begin_sums(bool first, const float* c, __m512 (&sums)[M][2]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      sums[i][half] = first ? _mm512_setzero_ps() : load_as<__m512>(c + i * kPanel + half * 16);
}

#if defined(__AVX512BF16__)
// Adds the products with one pair of k to the sums.
template <int M>
MM_INLINE void add_pair(const Scratch* x, int64_t x_stride, __m512i low, __m512i high, __m512 (&sums)[M][2]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    __m512bh a = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x + i * x_stride));
    sums[i][0] = _mm512_dpbf16_ps(sums[i][0], a, (__m512bh)low);
    sums[i][1] = _mm512_dpbf16_ps(sums[i][1], a, (__m512bh)high);
  }
}
#else
// Adds the products with one pair of k to the sums: first with the even k, then with the odd k.
template <int M>
MM_INLINE void add_pair(const Scratch* x, int64_t x_stride, __m512i low, __m512i high, __m512 (&sums)[M][2]) {
  const __m512i odd = _mm512_set1_epi32((int)0xffff0000);
  const __m512 values[2][2] = {{(__m512)_mm512_slli_epi32(low, 16), (__m512)_mm512_slli_epi32(high, 16)},
                               {(__m512)_mm512_and_si512(low, odd), (__m512)_mm512_and_si512(high, odd)}};
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int t = 0; t < 2; ++t) {
      const __m512 a = _mm512_set1_ps(x[i * x_stride + t]);
      sums[i][0] = _mm512_fmadd_ps(a, values[t][0], sums[i][0]);
      sums[i][1] = _mm512_fmadd_ps(a, values[t][1], sums[i][1]);
    }
}
#endif

template <int M>
MM_INLINE void store_sums(const __m512 (&sums)[M][2], float* c) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    store_as(c + i * kPanel, sums[i][0]);
    store_as(c + i * kPanel + 16, sums[i][1]);
  }
}

// Prefetches the next codes, one line per pair of k, while the decoded codes are read.
struct Next {
  const char* line;

  MM_INLINE_MEMBER void operator()(const char*) {
    __builtin_prefetch(line, 0, 2);
    line += 64;
  }
};

// totals [M, 32] += scaled sums of a group. `group_sum`: each row's sum of x over the group, if there are mins; else
// NULL.
template <int M>
MM_INLINE void add_totals(const __m512 (&sums)[M][2], const Scales& by, const float* group_sum, int groups,
                          __m512 (&totals)[M][2]) {
#pragma GCC unroll 16
  for (int row = 0; row < M; ++row)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      totals[row][half] = _mm512_fmadd_ps(sums[row][half], (__m512)by.scales[half], totals[row][half]);
      if (group_sum) {
        __m512 sum = _mm512_set1_ps(group_sum[row * groups]);
        totals[row][half] = _mm512_fmadd_ps(sum, (__m512)by.mins[half], totals[row][half]);
      }
    }
}

// c [M, 32] += the scaled products with `count` groups of decoded codes at w. `group_sums`: each row's sums of x over
// the groups, if there are mins; else NULL.
template <int M>
MM_INLINE void multiply_scaled(const Scratch* x, int64_t x_stride, const char* w, int size, const Scales* by, int count,
                               const float* group_sums, int groups, Next next, float* c) {
  __m512 totals[M][2];
  begin_sums<M>(false, c, totals);
  for (int i = 0; i < count; ++i, ++by) {
    __m512 sums[M][2] = {};
    for (int t = 0; t < size; t += 2, w += 128, x += 2) {
      next(w);
      add_pair<M>(x, x_stride, load_as<__m512i>(w), load_as<__m512i>(w + 64), sums);
    }
    add_totals<M>(sums, *by, group_sums ? group_sums + i : nullptr, groups, totals);
  }
  store_sums<M>(totals, c);
}

#if defined(__AVX512BF16__)
constexpr int kRows = 12;
// AMD's hardware prefetching is best up to kUnfetched rows, or kUnfetchedCodes rows with codes. For more rows, lines
// are prefetched kAhead bytes ahead.
constexpr int kUnfetched = 8, kUnfetchedCodes = 2, kAhead = 2048;

// Intel CPUs are faster with two-stage prefetching for any number of rows. They run this code if a hypervisor disables
// AMX.
template <bool ON_AMD, int AHEAD = kAhead>
MM_INLINE void fetch_line(bool amd, const char* line) {
  if (!amd)
    fetch_ahead<8192, 1024>(line);
  else if constexpr (ON_AMD)
    __builtin_prefetch(line + AHEAD);
}

// Prefetches later lines of the weights.
template <bool ON_AMD>
struct Later {
  const bool amd = kIsAmd;

  MM_INLINE_MEMBER void operator()(const char* pair) {
    fetch_line<ON_AMD>(amd, pair);
    fetch_line<ON_AMD>(amd, pair + 64);
  }
};

// c [M, 32] = x [M, steps * 32] * panel, plus the previous c unless `first`.
template <int M, class Fetch = Later<(M > kUnfetched)>>
void multiply(const Scratch* x, int64_t x_stride, const char* w, int64_t steps, bool first, float* c,
              Fetch fetch = Fetch()) {
  __m512 sums[M][2];
  begin_sums<M>(first, c, sums);
  for (int64_t step = 0; step < steps; ++step, w += 2048, x += kStep)
    for (int pair = 0; pair < 16; ++pair) {
      const char* at = w + pair * 128;
      fetch(at);
      add_pair<M>(x + 2 * pair, x_stride, load_as<__m512i>(at), load_as<__m512i>(at + 64), sums);
    }
  store_sums<M>(sums, c);
}

// Adds to `sums` the products with a group of `size` codes. The codes are decoded in registers. TILE: the decoded codes
// are also stored to `tile`.
template <class Codes, int M, bool TILE>
MM_INLINE void multiply_codes(const Codes& found, const Scratch* x, int64_t x_stride, const char* codes, int size,
                              char* tile, __m512 (&sums)[M][2]) {
  const bool amd = kIsAmd;
  for (int t = 0; t < size; t += 4, codes += Codes::kNext, x += 4) {
    __m512i low[2], high[2];
#pragma GCC unroll 2
    for (int line = 0; line < Codes::kBytes; line += 64) fetch_line<(M > kUnfetchedCodes)>(amd, codes + line);
    found.pairs(codes, low, high);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      add_pair<M>(x + 2 * pair, x_stride, low[pair], high[pair], sums);
      if constexpr (TILE) {
        store_as(tile + t * 64 + pair * 128, low[pair]);
        store_as(tile + t * 64 + pair * 128 + 64, high[pair]);
      }
    }
  }
}

#else
constexpr int kRows = 12;
constexpr int kAhead = 8192;  // how many bytes ahead weights are prefetched

// c [M, 32] = x [M, steps * 32] * panel, plus the previous c unless `first`. Each pair of k takes two FMAs, first for
// the even k and then for the odd k.
template <int M>
void multiply(const Scratch* x, int64_t x_stride, const char* w, int64_t steps, bool first, float* c) {
  f16v sums[M][2] = {};
  if (!first)
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      sums[i][0] = load_as<f16v>(c + i * kPanel);
      sums[i][1] = load_as<f16v>(c + i * kPanel + 16);
    }
  for (int64_t step = 0; step < steps; ++step, w += 2048, x += kStep) {
    for (int pair = 0; pair < 16; ++pair) {
      const char* at = w + pair * 128;
      __builtin_prefetch(at + kAhead);
      __builtin_prefetch(at + kAhead + 64);
      u16v low = load_as<u16v>(at), high = load_as<u16v>(at + 64);
      f16v even[2] = {(f16v)(low << 16), (f16v)(high << 16)};
      f16v odd[2] = {(f16v)(low & 0xffff0000u), (f16v)(high & 0xffff0000u)};
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const float* a = x + i * x_stride + 2 * pair;
        f16v first = splat(a[0]), second = splat(a[1]);
        sums[i][0] += first * even[0];
        sums[i][1] += first * even[1];
        sums[i][0] += second * odd[0];
        sums[i][1] += second * odd[1];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    store_as(c + i * kPanel, sums[i][0]);
    store_as(c + i * kPanel + 16, sums[i][1]);
  }
}
constexpr int kWide = 2 * kColumns;  // columns that are summed at once

// sums [M, kWide] += x [M, size] * codes. FP8 codes are scaled before the product.
template <class Codes, int M>
MM_INLINE void multiply_codes(const Scratch* x, int64_t x_stride, const char* codes, int size,
                              const columns (&scales)[2], columns (&sums)[M][2]) {
  for (int t = 0; t < size; t += 2, codes += Codes::kBytes, x += 2) {
    __builtin_prefetch(codes + kAhead);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      columns first, second;
      Codes::two(codes + v * kColumns, first, second);
      if constexpr (std::is_same_v<Codes, Fp8Codes>)
        first = scaled(first, scales[v]), second = scaled(second, scales[v]);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        sums[i][v] += x[i * x_stride] * first;
        sums[i][v] += x[i * x_stride + 1] * second;
      }
    }
  }
}
#endif

}  // namespace mm
