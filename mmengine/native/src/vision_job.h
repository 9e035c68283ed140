// What the kernels of the vision tower's attention share: one task, and q and k on their way into it.
#pragma once

#include "attention_softmax.h"
#include "vision.h"

namespace mm {

constexpr int kKeyBlock = 512;     // keys whose scores are held at once; a group's tiles pass over them in turn
constexpr int kScoresStride = kKeyBlock + 16;  // rows a little apart, or they share cache sets
constexpr int kQueryChunk = 1024;  // most queries of a task; a segment's keys are packed anew for each
constexpr int kMaxVisionHead = 256;

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

}  // namespace mm
