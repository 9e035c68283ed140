// Sixteen values of a row at a time, float32 or bfloat16, as floats.
#pragma once

#include <cmath>
#include <cstring>

#include "linear_vec.h"

namespace mm {

template <bool BF16>
MM_INLINE f16v load16(const char* from, int64_t at) {
  if constexpr (BF16) return widen(load_as<h16v>(from + at * 2));
  return load_as<f16v>(from + at * 4);
}

template <bool BF16>
MM_INLINE void store16(char* to, int64_t at, f16v v) {
  if constexpr (BF16)
    store_as(to + at * 2, narrow(v));
  else
    store_as(to + at * 4, v);
}

// The same of the first `count` values, zeros behind them.
template <bool BF16>
MM_INLINE f16v load_part(const char* from, int64_t at, int count) {
  constexpr int size = BF16 ? 2 : 4;
  if (count >= 16) return load16<BF16>(from, at);
  alignas(64) char part[64] = {};
  memcpy(part, from + at * size, count * size);
  return load16<BF16>(part, 0);
}

template <bool BF16>
MM_INLINE void store_part(char* to, int64_t at, f16v v, int count) {
  constexpr int size = BF16 ? 2 : 4;
  if (count >= 16) return store16<BF16>(to, at, v);
  alignas(64) char part[64];
  store16<BF16>(part, 0, v);
  memcpy(to + at * size, part, count * size);
}

template <bool BF16>
MM_INLINE f16v rounded(f16v v) {
  if constexpr (BF16) return round_bf16(v);
  return v;
}

MM_INLINE float sum16(f16v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[16];
  store_as(lanes, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

}  // namespace mm
