// Attention of one query a row: K and V are read once, in address order, by dot products and weighted sums.
//
// A span of kSpan tokens at a time: scores of all heads, softmax, then the weighted sum of the values.
// Spans lie at fixed positions of a row, so that a result does not depend on how work was shared.
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "attention_job.h"
#include "attention_tiles.h"

namespace mm {
namespace {

constexpr int kSpan = 64;   // tokens whose scores are held at once
constexpr int kTokens = 4;  // tokens of a tile of dot products
constexpr int kAhead = 8;   // tokens whose keys are asked for before they are used
#if defined(__AVX512F__)
constexpr int kHeads = 4;    // heads that take one reading of K from registers
constexpr int kVectors = 8;  // registers of sums a head; two heads fill half of all
#else
constexpr int kHeads = 2;
constexpr int kVectors = 4;
#endif

// How K meets q: q as it is kept, and how many values a vector of K has.
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

// The sums of four vectors, side by side.
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

// Scores of N heads that share a KV head against kTokens keys.
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

// sums [G, N registers] = sums * shrink + weights [G, count] v [count, N registers]
template <int G, int N, bool kEight, class T>
MM_INLINE void mix(const T* const* v, int64_t at, int count, const float* weights, const float* shrink,
                   float* sums, int64_t width) {
  wide sum[G][N];
#pragma GCC unroll 2
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sum[g][j] = load_wide(sums + g * width + j * kWide) * shrink[g];
  for (int t = 0; t < count; t++) {
    wide weight[G];
#pragma GCC unroll 2
    for (int g = 0; g < G; g++) weight[g] = all(weights[g * kSpan + t]);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      wide value = kEight ? load_eight(v[t] + at) : load_wide(v[t] + at + j * kWide);
#pragma GCC unroll 2
      for (int g = 0; g < G; g++) sum[g][j] += weight[g] * value;
    }
  }
#pragma GCC unroll 2
  for (int g = 0; g < G; g++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) store_as(sums + g * width + j * kWide, sum[g][j]);
}

template <int G, class T>
void mix_head(const T* const* v, int64_t head, int d, int count, const float* weights, const float* shrink,
              float* sums, int64_t width) {
  constexpr int kHalf = kVectors / 2;
  int i = 0;
  for (; i + kVectors * kWide <= d; i += kVectors * kWide)
    mix<G, kVectors, false>(v, head + i, count, weights, shrink, sums + i, width);
  if (i + kHalf * kWide <= d) {
    mix<G, kHalf, false>(v, head + i, count, weights, shrink, sums + i, width);
    i += kHalf * kWide;
  }
  for (; i + kWide <= d; i += kWide) mix<G, 1, false>(v, head + i, count, weights, shrink, sums + i, width);
  if (i < d) mix<G, 1, true>(v, head + i, count, weights, shrink, sums + i, width);
}

// One row's work in memory; heads counted from the task's first.
template <class T>
struct Row {
  using Query = typename Dot<T>::Query;
  Query* q;       // [heads, q_width], zeros behind d
  float* sums;    // [heads, width]
  float* scores;  // [heads, kSpan]
  float* shrink;  // [heads]
  RunningSoftmax* softmax;  // [heads]
  const T *k[kSpan], *v[kSpan];  // of the span's tokens
  int heads, group, d, q_width, width;

  Row(Carver& carver, const mm_attention_step& step, int kv_heads)
      : group(step.num_heads / step.num_kv_heads), d(step.head_dim) {
    heads = kv_heads * group;
    q_width = (int)round_up(d, Dot<T>::kStep), width = (int)round_up(d, 16);
    q = carver.take<Query>((int64_t)heads * q_width);
    sums = carver.take<float>((int64_t)heads * width);
    scores = carver.take<float>((int64_t)heads * kSpan);
    shrink = carver.take<float>(heads);
    softmax = carver.take<RunningSoftmax>(heads);
  }
};

// Asks for all heads of a token ahead of their use: by head they lie in pieces, which the CPU does not foresee.
template <class T>
MM_INLINE void fetch(const Row<T>& row, const T* token) {
  const char* at = (const char*)token;
  for (int64_t i = 0; i < (int64_t)row.heads / row.group * row.d * (int)sizeof(T); i += 64)
    _mm_prefetch(at + i, _MM_HINT_T1);
}

template <class T>
void score_span(Row<T>& row, int count) {
  using Query = typename Dot<T>::Query;
  for (int t = 0; t < count; t += kTokens) {
    for (int i = t; i < t + kTokens; i++) {
      if (i + kAhead < count) fetch(row, row.k[i + kAhead]);
      fetch(row, row.v[i]);
    }
    for (int head = 0; head < row.heads;) {
      const int64_t kv = (int64_t)(head / row.group) * row.d;
      const int left = row.group - head % row.group;
      const Query* q = row.q + (int64_t)head * row.q_width;
      float* scores = row.scores + head * kSpan + t;
      if (kHeads >= 4 && left >= 4) {
        score<4>(row.k + t, kv, q, row.q_width, row.d, scores);
        head += 4;
      } else if (kHeads >= 2 && left >= 2) {
        score<2>(row.k + t, kv, q, row.q_width, row.d, scores);
        head += 2;
      } else {
        score<1>(row.k + t, kv, q, row.q_width, row.d, scores);
        head += 1;
      }
    }
  }
}

template <class T>
void mix_span(Row<T>& row, int count) {
  for (int head = 0; head < row.heads;) {
    const int64_t kv = (int64_t)(head / row.group) * row.d;
    const float* weights = row.scores + head * kSpan;
    float* sums = row.sums + (int64_t)head * row.width;
    if (row.group - head % row.group >= 2) {
      mix_head<2>(row.v, kv, row.d, count, weights, row.shrink + head, sums, row.width);
      head += 2;
    } else {
      mix_head<1>(row.v, kv, row.d, count, weights, row.shrink + head, sums, row.width);
      head += 1;
    }
  }
}

MM_INLINE void put(float* to, float value) { *to = value; }
MM_INLINE void put(uint16_t* to, float value) { *to = to_bf16(value); }

template <class T>
void decode(const AttentionCall& call, const AttentionTask& task, void* scratch) {
  const mm_attention_step& step = *call.step;
  Carver carver = {(char*)scratch};
  Row<T> row(carver, step, task.head1 - task.head0);
  const int d = row.d, kv_len = step.kv_lens[task.row];
  const int64_t token = step.query_starts[task.row], first = (int64_t)task.head0 * row.group * d;
  const T* q = (const T*)call.q + token * call.q_stride + first;
  for (int head = 0; head < row.heads; head++)
    for (int i = 0; i < row.q_width; i++)
      row.q[(int64_t)head * row.q_width + i] = Dot<T>::keep(i < d ? as_float(q[(int64_t)head * d + i]) : 0);
  memset(row.sums, 0, (int64_t)row.heads * row.width * sizeof(float));
  const Places places(step, task.row);
  const T* kv = (const T*)call.kv + (int64_t)task.head0 * d;
  const float scale = 1.0f / std::sqrt((float)d);
  for (int at = 0; at < kv_len; at += kSpan) {
    const int count = kv_len - at < kSpan ? kv_len - at : kSpan;
    for (int t = 0; t < round_up(count, kTokens); t++) {  // the missing ones of the last four repeat the last
      row.k[t] = kv + places.of(at + (t < count ? t : count - 1));
      row.v[t] = row.k[t] + places.v_offset;
    }
    score_span(row, count);
    for (int head = 0; head < row.heads; head++) {
      float* scores = row.scores + head * kSpan;
      row.shrink[head] = soften(scores, count, scale, row.softmax[head], at == 0,
                                [=](int i, f16v weight) { store_as(scores + i, weight); });
    }
    mix_span(row, count);
  }
  T* out = (T*)call.out + token * call.out_stride + first;
  for (int head = 0; head < row.heads; head++)
    for (int i = 0; i < d; i++)
      put(out + (int64_t)head * d + i, row.sums[(int64_t)head * row.width + i] / row.softmax[head].total);
}

}  // namespace

int64_t decode_scratch_bytes(const mm_attention_step& step) {
  Carver carver = {nullptr};
  Row<float> row(carver, step, step.num_kv_heads);  // a float is as wide as it gets
  return carver.used;
}

void attention_decode(const AttentionCall& call, const AttentionTask& task, void* scratch) {
  (call.step->dtype == 0 ? decode<float> : decode<uint16_t>)(call, task, scratch);
}

}  // namespace mm
