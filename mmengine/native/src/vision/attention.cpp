// Attention in the vision tower, where a segment is a frame. Rotates queries and keys while they are packed.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "attention/flash.h"
#include "common/threads.h"
#include "vision/vision.h"

namespace mm {
namespace {

constexpr int kQueryChunk = 4096;  // most queries per task; each task packs the segment's keys again
constexpr int kLeastChunk = 512;   // fewest queries per task if threads share a segment
constexpr int kTasks = 4;          // tasks per thread for a long segment

// Queries [query0, query1) of one head against the keys [start, stop) of their segment.
struct VisionTask {
  const mm_segments* segments;
  const void* qkv;
  int64_t qkv_stride;
  void* out;
  int64_t out_stride, out_query;  // out_query: the query whose result is first in `out`
  int64_t start, stop, query0, query1;
  int head;
};

// Rotates `half` pairs of values: to = x * cos + (x with its halves swapped) * sin.
MM_INLINE void rotate(const float* __restrict x, const float* __restrict cos, const float* __restrict sin, int half,
                      float* __restrict to) {
  for (int i = 0; i < half; i++) {
    float low = x[i], high = x[i + half];
    to[i] = low * cos[i] + high * sin[i];
    to[i + half] = high * cos[i + half] + low * sin[i + half];
  }
}

MM_INLINE void rotate(const uint16_t* __restrict x, const float* __restrict cos, const float* __restrict sin, int half,
                      uint16_t* __restrict to) {
  for (int i = 0; i < half; i++) {
    float low = from_bf16(x[i]), high = from_bf16(x[i + half]);
    to[i] = to_bf16(low * cos[i] + high * sin[i]);
    to[i + half] = to_bf16(high * cos[i + half] + low * sin[i + half]);
  }
}

template <class Value>
class SegmentSource {
 public:
  using T = Value;

  explicit SegmentSource(const VisionTask& task) : task_(task) {}

  int head_dim() const { return task_.segments->head_dim; }
  int queries() const { return (int)(task_.query1 - task_.query0); }
  int keys() const { return (int)(task_.stop - task_.start); }
  int value_dim() const { return head_dim(); }
  Scoring scoring() const { return {1.0f / std::sqrt((float)head_dim()), 0}; }
  bool has_sinks() const { return false; }
  float sink(int) const { return 0; }
  int first(int) const { return 0; }
  int seen(int) const { return keys(); }
  const T* query(int i, T* room) const { return turned(0, task_.query0 + i, room); }
  const T* key(int i, T* room) const { return turned(1, task_.start + i, room); }
  const T* value(int i) const { return at(2, task_.start + i); }
  T* out(int i) const {
    return (T*)task_.out + (task_.query0 + i - task_.out_query) * task_.out_stride + (int64_t)task_.head * head_dim();
  }

 private:
  const T* at(int part, int64_t patch) const {  // part: 0 q, 1 k, 2 v
    const int64_t head = (int64_t)part * task_.segments->num_heads + task_.head;
    return (const T*)task_.qkv + patch * task_.qkv_stride + head * head_dim();
  }

  const T* turned(int part, int64_t patch, T* room) const {
    const mm_segments& segments = *task_.segments;
    const int64_t angles = patch * segments.head_dim;
    if (segments.cos == nullptr) return at(part, patch);
    rotate(at(part, patch), segments.cos + angles, segments.sin + angles, segments.head_dim / 2, room);
    return room;
  }

  const VisionTask& task_;
};

using Fp32 = Flash<VectorTiles, SegmentSource<float>>;
using Bf16 = Flash<Bf16Tiles, SegmentSource<uint16_t>>;

// Computes attention for those queries of [query0, query1) that are in the segment.
void attend_segment(const VisionTask& whole, void* scratch) {
  const int64_t first = whole.query0 > whole.start ? whole.query0 : whole.start;
  const int64_t last = whole.query1 < whole.stop ? whole.query1 : whole.stop;
  const int64_t length = last - first, heads = whole.segments->num_heads;
  if (length <= 0) return;
  const int64_t shared = (kTasks * num_threads() + heads - 1) / heads, most = (length + kLeastChunk - 1) / kLeastChunk;
  const int64_t least = (length + kQueryChunk - 1) / kQueryChunk, wanted = shared < most ? shared : most;
  const int64_t chunks = wanted > least ? wanted : least;
  const int64_t chunk = round_up((length + chunks - 1) / chunks, 32);
#pragma omp for schedule(dynamic) nowait
  for (int64_t n = 0; n < chunks * heads; n++) {
    VisionTask task = whole;
    task.head = (int)(n % heads);
    task.query0 = first + n / heads * chunk;
    task.query1 = task.query0 + chunk < last ? task.query0 + chunk : last;
    if (task.query0 >= task.query1) continue;
    if (whole.segments->dtype == 0)
      Fp32::run(SegmentSource<float>(task), scratch);
    else
      Bf16::run(SegmentSource<uint16_t>(task), scratch);
  }
}

int64_t scratch_bytes(const mm_segments* segments) {
  int64_t longest = 0;
  for (int s = 0; s < segments->num_segments; s++) {
    int64_t length = segments->starts[s + 1] - segments->starts[s];
    longest = length > longest ? length : longest;
  }
  const int queries = (int)(longest < kQueryChunk ? longest : kQueryChunk);
  return (segments->dtype == 0 ? Fp32::bytes : Bf16::bytes)(segments->head_dim, segments->head_dim, queries);
}

}  // namespace
}  // namespace mm

extern "C" int32_t mm_vision_attention(const mm_segments* segments, const void* qkv, int64_t qkv_stride, int64_t first,
                                       int64_t last, void* out, int64_t out_stride) {
  using namespace mm;
  const int64_t bytes = scratch_bytes(segments);
  const int threads = most_threads();
  char* scratch = (char*)aligned_alloc(64, (size_t)(bytes * threads));
  if (scratch == nullptr) return 1;
#pragma omp parallel num_threads(threads)
  {
    char* own = scratch + bytes * this_thread();
    for (int s = 0; s < segments->num_segments; s++)
      attend_segment({segments, qkv, qkv_stride, out, out_stride, first, segments->starts[s], segments->starts[s + 1],
                      first, last, 0},
                     own);
  }
  free(scratch);
  return 0;
}
