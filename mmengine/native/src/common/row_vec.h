// Loads and stores row values, float32 or bfloat16, as floats: sixteen at a time, or one register (common/wide_vec.h).
#pragma once

#include <cmath>
#include <cstring>

#include "common/wide_vec.h"

namespace mm {

// The vector with as many bfloat16 values as V has floats.
template <class V>
struct Bf16Of {
  typedef h16v type;
};
#if !defined(__AVX512F__)
template <>
struct Bf16Of<wide> {
  typedef wide_half type;
};
#endif

template <bool BF16, class V = f16v>
MM_INLINE V load_row(const char* from, int64_t at) {
  if constexpr (BF16) return widen(load_as<typename Bf16Of<V>::type>(from + at * 2));
  return load_as<V>(from + at * 4);
}

template <bool BF16, class V>
MM_INLINE void store_row(char* to, int64_t at, V v) {
  if constexpr (BF16)
    store_as(to + at * 2, narrow(v));
  else
    store_as(to + at * 4, v);
}

// Like load_row, but loads only `count` values. The vector's other values are zeros.
template <bool BF16, class V = f16v>
MM_INLINE V load_part(const char* from, int64_t at, int count) {
  constexpr int size = BF16 ? 2 : 4;
  if (count >= (int)sizeof(V) / 4) return load_row<BF16, V>(from, at);
  alignas(64) char part[64] = {};
  memcpy(part, from + at * size, count * size);
  return load_row<BF16, V>(part, 0);
}

template <bool BF16, class V>
MM_INLINE void store_part(char* to, int64_t at, V v, int count) {
  constexpr int size = BF16 ? 2 : 4;
  if (count >= (int)sizeof(V) / 4) return store_row<BF16>(to, at, v);
  alignas(64) char part[64];
  store_row<BF16>(part, 0, v);
  memcpy(to + at * size, part, count * size);
}

template <bool BF16, class V>
MM_INLINE V rounded(V v) {
  if constexpr (BF16) return round_bf16(v);
  return v;
}

template <class V>
MM_INLINE float sum_row(V v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  constexpr int count = sizeof(V) / 4;
  float lanes[count];
  store_as(lanes, v);
  for (int width = count / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

}  // namespace mm
