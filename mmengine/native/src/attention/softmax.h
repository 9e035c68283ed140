// Helpers for all attention kernels: dividing scratch memory, scalar bfloat16, and softmax over blocks of keys.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/wide_vec.h"

namespace mm {

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Divides a thread's memory into consecutive parts, each aligned for vectors. If `at` is NULL, only counts the bytes.
struct Carver {
  char* at;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    T* part = (T*)(at + used);
    used += round_up(count * (int64_t)sizeof(T), 64);
    return part;
  }
};

MM_INLINE float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

MM_INLINE float as_float(float value) { return value; }
MM_INLINE float as_float(uint16_t bits) { return from_bf16(bits); }

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN. Free of branches, so that loops vectorise.
MM_INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16) | 0x40;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

// How scores are computed: score * scale, or with a soft cap softcap * tanh(score * scale / softcap).
struct Scoring {
  float scale, softcap;  // softcap 0: none

  // The factor by which scores must be multiplied after cap_scores.
  float factor() const { return softcap > 0 ? 1.0f : scale; }
};

// tanh(x) with a relative error below 3e-7; NaN stays NaN. Near 0 the quotient loses digits, so an odd minimax
// polynomial replaces it.
MM_INLINE wide tanh_of(wide x) {
  typedef decltype(x < x) ints;
  const wide square = x * x;
  wide near = all(-0.00570498726f);
  near = near * square + 0.0206390875f;
  near = near * square + -0.0537397152f;
  near = near * square + 0.133314422f;
  near = near * square + -0.333332819f;
  near = x + x * square * near;
  const wide size = x < 0.0f ? -x : x, far = 1.0f - 2.0f / (1.0f + exp_clamped(2.0f * size));
  const ints is_near = size < 0.625f;
  return is_near ? near : x < 0.0f ? -far : far;
}

// Applies the soft cap, if any, to the scores [from, to), and to the rest of the last vector.
MM_INLINE void cap_scores(float* scores, int from, int to, const Scoring& scoring) {
  if (!(scoring.softcap > 0)) return;
  const float factor = scoring.scale / scoring.softcap;
  for (int i = from; i < to; i += kWide)
    store_as(scores + i, scoring.softcap * tanh_of(factor * load_wide(scores + i)));
}

// The softmax of one query over consecutive blocks of keys.
struct RunningSoftmax {
  float top, total;
};

MM_INLINE float highest(f16v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int i = 1; i < 16; i++) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

MM_INLINE float sum_of(f16v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0;
  for (int i = 0; i < 16; i++) sum += v[i];
  return sum;
#endif
}

#if defined(__AVX512F__)
// 2^x with a relative error below 2e-7. Results below 2^-149 are 0; NaN stays NaN. The polynomial of degree 5 is the
// minimax polynomial (relative error) on [-1/2, 1/2] with value 1 at 0.
MM_INLINE f16v exp2_of(f16v x) {
  const __m512 v = _mm512_max_ps(_mm512_set1_ps(-200), (__m512)x);  // max returns its second operand for NaN
  const __m512 whole = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const f16v r = (f16v)v - (f16v)whole;
  f16v p = fused(splat(1.326472731e-3f), r, splat(9.671512991e-3f));
  p = fused(p, r, splat(5.550733581e-2f));
  p = fused(p, r, splat(2.402224243e-1f));
  p = fused(p, r, splat(6.931470037e-1f));
  p = fused(p, r, splat(1));
  return (f16v)_mm512_scalef_ps((__m512)p, whole);
}
constexpr float kPowers = 1.44269504f;  // log2(e), because the weights are powers of two
MM_INLINE f16v weight_of(f16v x, f16v) { return exp2_of(x); }
#else
constexpr float kPowers = 1;
MM_INLINE f16v weight_of(f16v x, f16v score) { return (f16v)((i16v)exp_clamped(x) & (score != -__builtin_inff())); }
#endif

// Passes the softmax weights of `count` scores to `keep`, 16 at a time. The weights are relative to the highest score
// so far. Padding to a multiple of 16 gets the weight 0. Returns the factor by which the caller must multiply its sums
// over earlier blocks.
template <class Keep>
MM_INLINE float soften(float* scores, int count, float scale, RunningSoftmax& state, bool first, Keep keep) {
  int padded = (int)round_up(count, 16);
  for (int i = count; i < padded; i++) scores[i] = -__builtin_inff();
  f16v top = load_as<f16v>(scores);
  for (int i = 16; i < padded; i += 16) {
    f16v v = load_as<f16v>(scores + i);
    top = v > top ? v : top;
  }
  float highest_now = highest(top);
  float new_top = first || highest_now > state.top ? highest_now : state.top;
  f16v sum = splat(0);
  scale *= kPowers;
  for (int i = 0; i < padded; i += 16) {
    f16v score = load_as<f16v>(scores + i);
    f16v weight = weight_of((score - new_top) * scale, score);
    keep(i, weight);
    sum += weight;
  }
  float shrink = first ? 0.0f : weight_of(splat((state.top - new_top) * scale), splat(state.top))[0];
  state.total = (first ? 0.0f : state.total * shrink) + sum_of(sum);
  state.top = new_top;
  return shrink;
}

// Like `soften`, for a query that sees only the keys [first, seen) of a block. scores[i] is the score of key i. Other
// keys in [from, count) get the weight 0, and so does the padding to a multiple of `whole`. `from` is a multiple of
// 16. If the query sees no key, the state does not change and the factor is 1.
template <class Keep>
MM_INLINE float weigh(float* scores, int from, int first, int seen, int count, int whole, const Scoring& scoring,
                      RunningSoftmax& state, bool begins, Keep keep) {
  const int end = (int)round_up(count, whole);
  if (seen > count) seen = count;
  if (first < from) first = from;
  float shrink = 1.0f;
  int at = from;
  if (first < seen) {
    const int start = first / 16 * 16;
    for (; at < start; at += 16) keep(at, splat(0));
    cap_scores(scores, start, seen, scoring);
    for (int i = start; i < first; i++) scores[i] = -__builtin_inff();
    shrink = soften(scores + start, seen - start, scoring.factor(), state, begins,
                    [=](int i, f16v weight) { keep(start + i, weight); });
    at = (int)round_up(seen, 16);
  }
  for (; at < end; at += 16) keep(at, splat(0));
  return shrink;
}

}  // namespace mm
