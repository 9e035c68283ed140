// Tiles on AMX: bfloat16, sums and softmax in float32.
//
// Keys stand in tiles of 32 values by 16 keys, values in tiles of 32 keys by 16 values, pairs together as
// TDPBF16PS multiplies them. Weights are rounded to bfloat16 before they meet the values, as torch does.
#if defined(__AMX_BF16__)
#include <immintrin.h>

#include "attention_tiles.h"

namespace mm {
namespace {

constexpr int kRows = AmxTiles::kRows;  // two tiles
constexpr int kTile = 512;              // bfloat16 values of a tile
constexpr int kWeightsStride = kKeyBlock + 32;

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

MM_INLINE __m512i load_pairs(const uint16_t* from, int count) {
  return count >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

// Sixteen values of two keys, those of a place side by side.
MM_INLINE __m512i interleave(const uint16_t* first, const uint16_t* second, int count) {
  const __mmask16 some = count >= 16 ? 0xffff : (1u << count) - 1;
  __m256i low = first ? _mm256_maskz_loadu_epi16(some, first) : _mm256_setzero_si256();
  __m256i high = second ? _mm256_maskz_loadu_epi16(some, second) : _mm256_setzero_si256();
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

}  // namespace

AmxTiles::AmxTiles(Carver& carver, int head_dim)
    : d_(head_dim), steps_((int)round_up(head_dim, 32) / 32), panels_((int)round_up(head_dim, 16) / 16) {
  keys_ = carver.take<uint16_t>(kKeyBlock * steps_ * 32);
  values_ = carver.take<uint16_t>(kKeyBlock * panels_ * 16);
  scores_ = carver.take<float>(kRows * kScoresStride);
  weights_ = carver.take<uint16_t>(kRows * kWeightsStride);
}

void AmxTiles::begin() const {
  static const TileConfig config;  // static: GCC's intrinsic tells it of the first 8 bytes alone
  _tile_loadconfig(&config);
}

void AmxTiles::end() const { _tile_release(); }

void AmxTiles::pack_query(const uint16_t* from, uint16_t* to) const {
  for (int i = 0; i < d_; i += 32) _mm512_storeu_si512(to + i, load_pairs(from + i, d_ - i));
}

void AmxTiles::pack(int at, const uint16_t* const* keys, const uint16_t* const* values, int count) const {
  for (int step = 0; step < steps_; step++) {
    f16v m[16] = {};
    for (int r = 0; r < 16 && r < count; r++) m[r] = (f16v)load_pairs(keys[r] + step * 32, d_ - step * 32);
    transpose16(m);
    uint16_t* to = keys_ + ((int64_t)at / 16 * steps_ + step) * kTile;
    for (int i = 0; i < 16; i++) store_as(to + i * 32, m[i]);
  }
  uint16_t* to = values_ + (int64_t)at / 32 * panels_ * kTile + at % 32 * 16;
  for (int r = 0; r < 16; r += 2)
    for (int panel = 0; panel < panels_; panel++) {
      const uint16_t* first = r < count ? values[r] + panel * 16 : nullptr;
      const uint16_t* second = r + 1 < count ? values[r + 1] + panel * 16 : nullptr;
      _mm512_storeu_si512(to + panel * kTile + r * 16, interleave(first, second, d_ - panel * 16));
    }
}

void AmxTiles::score(const uint16_t* q, int count) const {
  const int q_bytes = steps_ * 64, scores_bytes = kScoresStride * 4;
  for (int key = 0; key < count; key += 32) {
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

// sums (+)= weights * v, two panels of 16 values at a time; a last odd panel is done with an unused one
void AmxTiles::mix(int start, int count, float* sums) const {
  const int weights_bytes = kWeightsStride * 2, width = panels_ * 16, sums_bytes = width * 4;
  for (int panel = 0; panel < panels_; panel += 2) {
    const bool two = panel + 1 < panels_;
    float *upper = sums + panel * 16, *lower = upper + 16 * width;
    if (start == 0) {
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

void AmxTiles::attend(const QueryTile<uint16_t>& tile, int start, int count, float scale) const {
  const int width = panels_ * 16;
  score(tile.q, count);
  for (int r = 0; r < kRows; r++) {
    uint16_t* weights = weights_ + r * kWeightsStride;
    float shrink = weigh(scores_ + r * kScoresStride, tile.seen[r] - start, count, 32, scale, tile.softmax[r],
                         start == 0, [=](int at, f16v weight) {
                           store_as(weights + at, (h16v)_mm512_cvtneps_pbh((__m512)weight));
                         });
    if (start == 0 || shrink == 1.0f) continue;
    for (int i = 0; i < width; i++) tile.sums[r * width + i] *= shrink;
  }
  mix(start, count, tile.sums);
}

}  // namespace mm
#endif
