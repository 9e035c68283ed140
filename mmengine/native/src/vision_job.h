// What the kernels of the vision tower's attention share: one task, and q and k on their way into it.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear_vec.h"
#include "vision.h"

namespace mm {

constexpr int kKeyBlock = 512;     // keys whose scores are held at once; a group's tiles pass over them in turn
constexpr int kScoresStride = kKeyBlock + 16;  // rows a little apart, or they share cache sets
constexpr int kQueryChunk = 1024;  // most queries of a task; a segment's keys are packed anew for each
constexpr int kMaxVisionHead = 256;

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Parts of a thread's memory one after the other, each aligned for vectors. Without memory it counts.
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

// Queries [query0, query1) of one head against the keys [start, stop) of their segment.
struct VisionTask {
  const mm_segments* segments;
  const void* qkv;
  int64_t qkv_stride;
  void* out;
  int64_t out_stride;
  int64_t start, stop, query0, query1;
  int head;

  int head_dim() const { return segments->head_dim; }
  int64_t keys() const { return stop - start; }
  int64_t at(int part, int64_t patch) const {  // part: 0 q, 1 k, 2 v
    return patch * qkv_stride + ((int64_t)part * segments->num_heads + head) * segments->head_dim;
  }
};

// `scratch`: as many bytes as the kernel asks for, for a segment of so many keys.
int64_t vision_scratch_vector(int head_dim, int64_t keys);
void vision_attention_vector(const VisionTask& task, void* scratch);
#if defined(__AMX_BF16__)  // bfloat16
int64_t vision_scratch_amx(int head_dim, int64_t keys);
void vision_attention_amx(const VisionTask& task, void* scratch);
#endif

MM_INLINE float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// To the nearest, ties to even; NaN stays NaN. Without a branch, so that loops over it become vectors.
MM_INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16) | 0x40;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

// `half` pairs of values, rotated: to = x * cos + (x with its halves swapped) * sin. With `bf16` each is
// rounded as if it had been stored.
template <class T>
MM_INLINE void rotate(const T* __restrict x, const float* __restrict cos, const float* __restrict sin, int half,
                      float* __restrict to) {
  constexpr bool bf16 = sizeof(T) == 2;
  for (int i = 0; i < half; i++) {
    float low, high;
    if constexpr (bf16)
      low = from_bf16(x[i]), high = from_bf16(x[i + half]);
    else
      low = x[i], high = x[i + half];
    float first = low * cos[i] + high * sin[i], second = high * cos[i + half] + low * sin[i + half];
    to[i] = bf16 ? from_bf16(to_bf16(first)) : first;
    to[i + half] = bf16 ? from_bf16(to_bf16(second)) : second;
  }
}

// One patch's values of one head (part 0 q, 1 k, 2 v) as they are.
inline void load_head(const VisionTask& task, int part, int64_t patch, float* __restrict to) {
  int d = task.head_dim();
  int64_t from = task.at(part, patch);
  if (task.segments->dtype == 0) {
    const float* values = (const float*)task.qkv + from;
    for (int i = 0; i < d; i++) to[i] = values[i];
    return;
  }
  const uint16_t* bits = (const uint16_t*)task.qkv + from;
  for (int i = 0; i < d; i++) to[i] = from_bf16(bits[i]);
}

// The same, turned to the patch's place.
inline void load_rotated(const VisionTask& task, int part, int64_t patch, float* to) {
  if (task.segments->cos == nullptr) return load_head(task, part, patch, to);
  int d = task.head_dim();
  const float *cos = task.segments->cos + patch * d, *sin = task.segments->sin + patch * d;
  int64_t from = task.at(part, patch);
  if (task.segments->dtype == 0)
    rotate((const float*)task.qkv + from, cos, sin, d / 2, to);
  else
    rotate((const uint16_t*)task.qkv + from, cos, sin, d / 2, to);
}

// A row of the result: sums over keys, divided by the weights' sum.
inline void store_head(const VisionTask& task, int64_t patch, const float* sums, float weight) {
  int d = task.head_dim();
  int64_t to = patch * task.out_stride + (int64_t)task.head * d;
  if (task.segments->dtype == 0) {
    float* out = (float*)task.out + to;
    for (int i = 0; i < d; i++) out[i] = sums[i] / weight;
  } else {
    uint16_t* out = (uint16_t*)task.out + to;
    for (int i = 0; i < d; i++) out[i] = to_bf16(sums[i] / weight);
  }
}

// Softmax over blocks of keys that come one after the other, for one query.
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

// Turns `count` scores (room to the next 16) into weights relative to the highest score so far, given to
// `keep` 16 at a time; behind the last one they are next to nothing, and v is 0 there or not read. Gives
// what the sums before this block must be multiplied with.
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
  for (int i = 0; i < padded; i += 16) {
    f16v weight = exp_clamped((load_as<f16v>(scores + i) - new_top) * scale);
    keep(i, weight);
    sum += weight;
  }
  float shrink = first ? 0.0f : exp_clamped(splat((state.top - new_top) * scale))[0];
  state.total = (first ? 0.0f : state.total * shrink) + sum_of(sum);
  state.top = new_top;
  return shrink;
}

}  // namespace mm
