// Attention within segments: the tasks, and the kernel in float32 vectors (AVX2, AVX-512).
//
// bfloat16 is widened while q, k and v are packed. Keys stand in panels [d][kPanelKeys], so that scores
// of many keys come from one broadcast of q; v stands [keys][d]. Both products are the same tile.
#include <cmath>
#include <cstdlib>
#include <cstring>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "vision_job.h"

namespace mm {
namespace {

constexpr int kRows = 6;  // queries of a tile
#if defined(__AVX512F__)
constexpr int kVectors = 4;  // of 16 floats: 24 sums in 32 registers
#else
constexpr int kVectors = 1;  // two AVX2 registers: 12 sums in 16
#endif
constexpr int kPanelKeys = 16 * kVectors;

// c [kRows, N * 16] = (c +) a [kRows, k] b [k, N * 16]
template <int N, bool kAdd>
void tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k, float* c, int64_t ldc) {
  f16v sums[kRows][N] = {};
  for (int64_t i = 0; i < k; i++) {
    f16v right[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) right[j] = load_as<f16v>(b + i * ldb + j * 16);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++) {
      f16v left = splat(a[r * lda + i]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) sums[r][j] += left * right[j];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      float* to = c + r * ldc + j * 16;
      store_as(to, kAdd ? load_as<f16v>(to) + sums[r][j] : sums[r][j]);
    }
}

template <bool kAdd>
void tile_of(int vectors, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k, float* c, int64_t ldc) {
  switch (vectors) {
    case 1: return tile<1, kAdd>(a, lda, b, ldb, k, c, ldc);
#if defined(__AVX512F__)
    case 2: return tile<2, kAdd>(a, lda, b, ldb, k, c, ldc);
    case 3: return tile<3, kAdd>(a, lda, b, ldb, k, c, ldc);
    case 4: return tile<4, kAdd>(a, lda, b, ldb, k, c, ldc);
#endif
  }
}

constexpr int kTiles = 16;                // tiles of queries that pass over a block of keys in turn, so
constexpr int kGroup = kTiles * kRows;    // that it is read from memory once for them

// Keys in panels [d][kPanelKeys] and values in rows [width], of a whole segment.
struct PackedKeys {
  float *panels, *values;
  int width;  // d up to whole vectors
};

struct Group {
  float* q;       // [kGroup, d]
  float* sums;    // [kGroup, width]
  float* scores;  // [kRows, kScoresStride]
  RunningSoftmax* softmax;  // [kGroup]
};

void carve(Carver& carver, int d, int64_t keys, PackedKeys& packed, Group& group) {
  packed.width = (int)round_up(d, 16);
  packed.panels = carver.take<float>(round_up(keys, kPanelKeys) * d);
  packed.values = carver.take<float>(keys * packed.width);
  group.q = carver.take<float>(kGroup * d);
  group.sums = carver.take<float>(kGroup * packed.width);
  group.scores = carver.take<float>(kRows * kScoresStride);
  group.softmax = carver.take<RunningSoftmax>(kGroup);
}

void pack(const VisionTask& task, const PackedKeys& packed) {
  const int d = task.head_dim();
  const int64_t keys = task.keys();
  alignas(64) float rows[16][kMaxVisionHead];
  for (int64_t key = 0; key < round_up(keys, 16); key += 16) {
    for (int r = 0; r < 16; r++)
      if (key + r < keys)
        load_rotated(task, 1, task.start + key + r, rows[r]);
      else
        memset(rows[r], 0, d * sizeof(float));
    float* to = packed.panels + key / kPanelKeys * kPanelKeys * d + key % kPanelKeys;
    for (int i = 0; i < d; i++)
      for (int r = 0; r < 16; r++) to[(int64_t)i * kPanelKeys + r] = rows[r][i];
  }
  for (int64_t key = 0; key < keys; key++) {
    float* to = packed.values + key * packed.width;
    load_head(task, 2, task.start + key, to);
    for (int i = d; i < packed.width; i++) to[i] = 0;
  }
}

void attend_block(const VisionTask& task, const PackedKeys& packed, int64_t block, const Group& group, int t) {
  const int d = task.head_dim(), width = packed.width;
  const float scale = 1.0f / std::sqrt((float)d);
  float* sums = group.sums + t * kRows * width;
  int count = (int)(task.keys() - block < kKeyBlock ? task.keys() - block : kKeyBlock);
  for (int key = 0; key < count; key += kPanelKeys) {
    int vectors = (int)round_up(count - key < kPanelKeys ? count - key : kPanelKeys, 16) / 16;
    tile_of<false>(vectors, group.q + t * kRows * d, d, packed.panels + (block + key) * d, kPanelKeys, d,
                   group.scores + key, kScoresStride);
  }
  for (int r = 0; r < kRows; r++) {
    float* scores = group.scores + r * kScoresStride;
    float shrink = soften(scores, count, scale, group.softmax[t * kRows + r], block == 0,
                          [=](int at, f16v weight) { store_as(scores + at, weight); });
    if (block == 0 || shrink == 1.0f) continue;
    for (int i = 0; i < width; i++) sums[r * width + i] *= shrink;
  }
  for (int column = 0; column < width; column += kPanelKeys) {
    int vectors = (width - column < kPanelKeys ? width - column : kPanelKeys) / 16;
    (block ? tile_of<true> : tile_of<false>)(vectors, group.scores, kScoresStride,
                                             packed.values + block * width + column, width, count,
                                             sums + column, width);
  }
}

void attend(const VisionTask& task, const PackedKeys& packed, int64_t query0, int64_t query1,
            const Group& group) {
  const int d = task.head_dim(), tiles = (int)((query1 - query0 + kRows - 1) / kRows);
  for (int r = 0; r < tiles * kRows; r++) {  // the last tile's missing queries repeat the last one
    int64_t query = query0 + r < query1 ? query0 + r : query1 - 1;
    load_rotated(task, 0, query, group.q + r * d);
  }
  for (int64_t block = 0; block < task.keys(); block += kKeyBlock)
    for (int t = 0; t < tiles; t++) attend_block(task, packed, block, group, t);
  for (int64_t query = query0; query < query1; query++)
    store_head(task, query, group.sums + (query - query0) * packed.width, group.softmax[query - query0].total);
}

}  // namespace

int64_t vision_scratch_vector(int head_dim, int64_t keys) {
  Carver carver = {nullptr};
  PackedKeys packed;
  Group group;
  carve(carver, head_dim, keys, packed, group);
  return carver.used;
}

void vision_attention_vector(const VisionTask& task, void* scratch) {
  Carver carver = {(char*)scratch};
  PackedKeys packed;
  Group group;
  carve(carver, task.head_dim(), task.keys(), packed, group);
  pack(task, packed);
  for (int64_t query = task.query0; query < task.query1; query += kGroup)
    attend(task, packed, query, query + kGroup < task.query1 ? query + kGroup : task.query1, group);
}

namespace {

void attend_segment(const VisionTask& whole, void* scratch) {
  const int64_t length = whole.stop - whole.start, heads = whole.segments->num_heads;
  if (length <= 0) return;
  const int64_t chunks = (length + kQueryChunk - 1) / kQueryChunk;
  const int64_t chunk = round_up((length + chunks - 1) / chunks, 32);
#pragma omp for schedule(dynamic) nowait
  for (int64_t n = 0; n < chunks * heads; n++) {
    VisionTask task = whole;
    task.head = (int)(n % heads);
    task.query0 = whole.start + n / heads * chunk;
    task.query1 = task.query0 + chunk < whole.stop ? task.query0 + chunk : whole.stop;
#if defined(__AMX_BF16__)
    if (whole.segments->dtype == 1) {
      vision_attention_amx(task, scratch);
      continue;
    }
#endif
    vision_attention_vector(task, scratch);
  }
}

int64_t scratch_bytes(const mm_segments* segments) {
  int64_t longest = 0;
  for (int s = 0; s < segments->num_segments; s++) {
    int64_t length = segments->starts[s + 1] - segments->starts[s];
    longest = length > longest ? length : longest;
  }
#if defined(__AMX_BF16__)
  if (segments->dtype == 1) return vision_scratch_amx(segments->head_dim, longest);
#endif
  return vision_scratch_vector(segments->head_dim, longest);
}

}  // namespace
}  // namespace mm

extern "C" int32_t mm_vision_attention(const mm_segments* segments, const void* qkv, int64_t qkv_stride,
                                       void* out, int64_t out_stride) {
  using namespace mm;
  const int64_t bytes = scratch_bytes(segments);
#if defined(_OPENMP)
  const int threads = omp_get_max_threads();
#else
  const int threads = 1;
#endif
  char* scratch = (char*)aligned_alloc(64, (size_t)(bytes * threads));
  if (scratch == nullptr) return 1;
#pragma omp parallel num_threads(threads)
  {
#if defined(_OPENMP)
    char* own = scratch + bytes * omp_get_thread_num();
#else
    char* own = scratch;
#endif
    for (int s = 0; s < segments->num_segments; s++)
      attend_segment({segments, qkv, qkv_stride, out, out_stride, segments->starts[s], segments->starts[s + 1], 0, 0, 0}, own);
  }
  free(scratch);
  return 0;
}
