// Attention within segments on AMX: bfloat16 tiles, sums and softmax in float32.
//
// Keys stand in tiles of 32 values by 16 keys, v in tiles of 32 keys by 16 values, pairs together as
// TDPBF16PS multiplies them. Weights are rounded to bfloat16 before they meet v, as torch does.
#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "vision_job.h"

namespace mm {
namespace {

constexpr int kRows = 32;          // queries that go together: two tiles
constexpr int kGroup = 8 * kRows;  // queries that pass over a block of keys in turn
constexpr int kTile = 512;         // bfloat16 values of a tile
constexpr int kWeightsStride = kKeyBlock + 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct PackedKeys {
  uint16_t *keys, *values;
  int steps, panels;  // of 32 and of 16 values of a head
};

// Two bfloat16 side by side; `first` comes first.
MM_INLINE uint32_t pair(uint16_t first, uint16_t second) { return first | (uint32_t)second << 16; }

void pack_keys(const VisionTask& task, const PackedKeys& packed) {
  const int d = task.head_dim(), pairs = packed.steps * 16;
  alignas(64) float row[kMaxVisionHead];
  alignas(64) uint32_t rows[16][kMaxVisionHead / 2];
  memset(rows, 0, sizeof rows);
  for (int64_t key = 0; key < round_up(task.keys(), 32); key += 16) {
    for (int r = 0; r < 16; r++) {
      if (key + r >= task.keys()) {
        memset(rows[r], 0, sizeof rows[r]);
        continue;
      }
      load_rotated(task, 1, task.start + key + r, row);
      uint16_t* bits = (uint16_t*)rows[r];
      for (int i = 0; i < d; i++) bits[i] = to_bf16(row[i]);
    }
    uint32_t* to = (uint32_t*)packed.keys + key * pairs;
    for (int p = 0; p < pairs; p++)
      for (int r = 0; r < 16; r++) to[p * 16 + r] = rows[r][p];
  }
}

void pack_values(const VisionTask& task, const PackedKeys& packed) {
  const int d = task.head_dim();
  alignas(64) uint16_t rows[2][kMaxVisionHead + 16] = {};
  for (int64_t key = 0; key < round_up(task.keys(), 32); key += 2) {
    for (int r = 0; r < 2; r++)
      if (key + r < task.keys())
        memcpy(rows[r], (const uint16_t*)task.qkv + task.at(2, task.start + key + r), d * 2);
      else
        memset(rows[r], 0, d * 2);
    uint32_t* to = (uint32_t*)packed.values + (key / 32 * packed.panels * 16 + key % 32 / 2) * 16;
    for (int panel = 0; panel < packed.panels; panel++)
      for (int i = 0; i < 16; i++)
        to[panel * 256 + i] = pair(rows[0][panel * 16 + i], rows[1][panel * 16 + i]);
  }
}

struct Group {
  uint16_t* q;        // [kGroup, steps * 32]
  float* sums;        // [kGroup, panels * 16]
  float* scores;      // [kRows, kScoresStride]
  uint16_t* weights;  // [kRows, kWeightsStride]
  RunningSoftmax* softmax;  // [kGroup]
};

void carve(Carver& carver, int d, int64_t keys, PackedKeys& packed, Group& group) {
  packed.steps = (int)round_up(d, 32) / 32;
  packed.panels = (int)round_up(d, 16) / 16;
  packed.keys = carver.take<uint16_t>(round_up(keys, 32) * packed.steps * 32);
  packed.values = carver.take<uint16_t>(round_up(keys, 32) * packed.panels * 16);
  group.q = carver.take<uint16_t>(kGroup * packed.steps * 32);
  group.sums = carver.take<float>(kGroup * packed.panels * 16);
  group.scores = carver.take<float>(kRows * kScoresStride);
  group.weights = carver.take<uint16_t>(kRows * kWeightsStride);
  group.softmax = carver.take<RunningSoftmax>(kGroup);
}

MM_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

void score(const PackedKeys& packed, const uint16_t* q, int64_t block, int count, float* scores) {
  const int q_bytes = packed.steps * 64, scores_bytes = kScoresStride * 4;
  for (int key = 0; key < count; key += 32) {
    const uint16_t* left = packed.keys + (block + key) / 16 * packed.steps * kTile;
    const uint16_t* right = left + packed.steps * kTile;
    clear_sums();
    for (int s = 0; s < packed.steps; s++) {
      _tile_loadd(4, q + s * 32, q_bytes);
      _tile_loadd(5, q + 16 * packed.steps * 32 + s * 32, q_bytes);
      _tile_loadd(6, left + s * kTile, 64);
      _tile_loadd(7, right + s * kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores + key, scores_bytes);
    _tile_stored(1, scores + key + 16, scores_bytes);
    _tile_stored(2, scores + 16 * kScoresStride + key, scores_bytes);
    _tile_stored(3, scores + 16 * kScoresStride + key + 16, scores_bytes);
  }
}

// sums (+)= weights * v, two panels of 16 values at a time; a last odd panel is done with an unused one
void mix(const PackedKeys& packed, const uint16_t* weights, int64_t block, int count, float* sums) {
  const int weights_bytes = kWeightsStride * 2, width = packed.panels * 16, sums_bytes = width * 4;
  for (int panel = 0; panel < packed.panels; panel += 2) {
    const bool two = panel + 1 < packed.panels;
    float *upper = sums + panel * 16, *lower = upper + 16 * width;
    if (block == 0) {
      clear_sums();
    } else {
      _tile_loadd(0, upper, sums_bytes);
      _tile_loadd(2, lower, sums_bytes);
      if (two) {
        _tile_loadd(1, upper + 16, sums_bytes);
        _tile_loadd(3, lower + 16, sums_bytes);
      }
    }
    for (int key = 0; key < count; key += 32) {
      const uint16_t* v = packed.values + ((block + key) / 32 * packed.panels + panel) * kTile;
      _tile_loadd(4, weights + key, weights_bytes);
      _tile_loadd(5, weights + 16 * kWeightsStride + key, weights_bytes);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if (!two) continue;
      _tile_loadd(7, v + kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, upper, sums_bytes);
    _tile_stored(2, lower, sums_bytes);
    if (two) {
      _tile_stored(1, upper + 16, sums_bytes);
      _tile_stored(3, lower + 16, sums_bytes);
    }
  }
}

void attend_block(const VisionTask& task, const PackedKeys& packed, int64_t block, const Group& group, int g) {
  const int width = packed.panels * 16;
  const float scale = 1.0f / std::sqrt((float)task.head_dim());
  int count = (int)(task.keys() - block < kKeyBlock ? task.keys() - block : kKeyBlock);
  float* sums = group.sums + g * kRows * width;
  score(packed, group.q + g * kRows * packed.steps * 32, block, count, group.scores);
  for (int r = 0; r < kRows; r++) {
    float* scores = group.scores + r * kScoresStride;
    uint16_t* weights = group.weights + r * kWeightsStride;
    float shrink = soften(scores, count, scale, group.softmax[g * kRows + r], block == 0, [=](int at, f16v weight) {
      store_as(weights + at, (h16v)_mm512_cvtneps_pbh((__m512)weight));
    });
    for (int i = (int)round_up(count, 16); i < round_up(count, 32); i++) weights[i] = 0;
    if (block == 0 || shrink == 1.0f) continue;
    for (int i = 0; i < width; i++) sums[r * width + i] *= shrink;
  }
  mix(packed, group.weights, block, count, sums);
}

void attend(const VisionTask& task, const PackedKeys& packed, int64_t query0, int64_t query1,
            const Group& group) {
  const int d = task.head_dim(), width = packed.panels * 16, row_values = packed.steps * 32;
  const int groups = (int)((query1 - query0 + kRows - 1) / kRows);
  float row[kMaxVisionHead];
  for (int r = 0; r < groups * kRows; r++) {
    load_rotated(task, 0, query0 + r < query1 ? query0 + r : query1 - 1, row);
    uint16_t* to = group.q + r * row_values;
    for (int i = 0; i < row_values; i++) to[i] = i < d ? to_bf16(row[i]) : 0;
  }
  for (int64_t block = 0; block < task.keys(); block += kKeyBlock)
    for (int g = 0; g < groups; g++) attend_block(task, packed, block, group, g);
  for (int64_t query = query0; query < query1; query++)
    store_head(task, query, group.sums + (query - query0) * width, group.softmax[query - query0].total);
}

}  // namespace

int64_t vision_scratch_amx(int head_dim, int64_t keys) {
  Carver carver = {nullptr};
  PackedKeys packed;
  Group group;
  carve(carver, head_dim, keys, packed, group);
  return carver.used;
}

void vision_attention_amx(const VisionTask& task, void* scratch) {
  Carver carver = {(char*)scratch};
  PackedKeys packed;
  Group group;
  carve(carver, task.head_dim(), task.keys(), packed, group);
  pack_keys(task, packed);
  pack_values(task, packed);
  TileConfig config;
  _tile_loadconfig(&config);
  for (int64_t query = task.query0; query < task.query1; query += kGroup)
    attend(task, packed, query, query + kGroup < task.query1 ? query + kGroup : task.query1, group);
  _tile_release();
}

}  // namespace mm
#endif
