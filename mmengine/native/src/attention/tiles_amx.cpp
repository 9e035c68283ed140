// Attention tiles with AMX: bfloat16 inputs, sums and softmax in float32.
#if defined(__AMX_BF16__)
#include <immintrin.h>

#include "attention/tiles.h"

namespace mm {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

MM_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

}  // namespace

void PairTiles::begin() const {
  // Static, because GCC assumes that the intrinsic reads only 8 bytes of its argument. GCC could drop the other stores
  // to a local variable.
  static const TileConfig config;
  _tile_loadconfig(&config);
}

void PairTiles::end() const { _tile_release(); }

void PairTiles::score(const uint16_t* q, int from, int count) const {
  const int q_bytes = steps_ * 64, scores_bytes = kScoresStride * 4;
  for (int key = from; key < count; key += 32) {
    const uint16_t* left = keys_ + (int64_t)key / 16 * steps_ * kTile;
    const uint16_t* right = left + steps_ * kTile;
    clear_sums();
    for (int s = 0; s < steps_; s++) {
      _tile_loadd(4, q + s * 32, q_bytes);
      _tile_loadd(5, q + 16 * steps_ * 32 + s * 32, q_bytes);
      _tile_loadd(6, left + s * kTile, 64);
      _tile_loadd(7, right + s * kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores_ + key, scores_bytes);
    _tile_stored(1, scores_ + key + 16, scores_bytes);
    _tile_stored(2, scores_ + 16 * kScoresStride + key, scores_bytes);
    _tile_stored(3, scores_ + 16 * kScoresStride + key + 16, scores_bytes);
  }
}

// Sums two panels of 16 values at a time. A last odd panel is summed alone.
void PairTiles::mix(int from, int count, bool begins, float* sums) const {
  const int weights_bytes = kWeightsStride * 2, width = panels_ * 16, sums_bytes = width * 4;
  for (int panel = 0; panel < panels_; panel += 2) {
    const bool two = panel + 1 < panels_;
    float *upper = sums + panel * 16, *lower = upper + 16 * width;
    if (begins) {
      clear_sums();
    } else {
      _tile_loadd(0, upper, sums_bytes);
      _tile_loadd(2, lower, sums_bytes);
      if (two) {
        _tile_loadd(1, upper + 16, sums_bytes);
        _tile_loadd(3, lower + 16, sums_bytes);
      }
    }
    for (int key = from; key < count; key += 32) {
      const uint16_t* v = values_ + ((int64_t)key / 32 * panels_ + panel) * kTile;
      _tile_loadd(4, weights_ + key, weights_bytes);
      _tile_loadd(5, weights_ + 16 * kWeightsStride + key, weights_bytes);
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

}  // namespace mm
#endif
