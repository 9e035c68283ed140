// Attention tiles of float32 vectors. Keys are stored in panels [d][kPanelKeys], so each broadcast value from q is
// multiplied with many keys. Values are stored as [keys][width]. `tile` computes both matmuls.
#include "attention/tiles.h"

namespace mm {
namespace {

constexpr int kRows = VectorTiles::kRows;
#if defined(__AVX512F__)
constexpr int kVectors = 4;  // vectors of 16 floats; 24 sums use 24 of 32 registers
#else
constexpr int kVectors = 1;  // a vector is two AVX2 registers; 12 sums use 12 of 16 registers
#endif
constexpr int kPanelKeys = 16 * kVectors;

// c [kRows, N * 16] = a [kRows, k] b [k, N * 16], added to the old c if kAdd.
template <int N, bool kAdd>
void tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k, float* c, int64_t ldc) {
  constexpr int kParts = N * 16 / kWide;
  wide sums[kRows][kParts] = {};
  for (int64_t i = 0; i < k; i++) {
    wide right[kParts];
#pragma GCC unroll 4
    for (int j = 0; j < kParts; j++) right[j] = load_wide(b + i * ldb + j * kWide);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++) {
      wide left = all(a[r * lda + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kParts; j++) sums[r][j] += left * right[j];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < kParts; j++) {
      float* to = c + r * ldc + j * kWide;
      store_as(to, kAdd ? load_wide(to) + sums[r][j] : sums[r][j]);
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

template <class T>
MM_INLINE void unpack(const T* from, int d, float* to) {
  int i = 0;
  for (; i + kWide <= d; i += kWide) store_as(to + i, load_wide(from + i));
  for (; i < d; i++) to[i] = as_float(from[i]);
}

// Transposes up to sixteen keys to columns of a panel; missing keys become zeros.
template <class T>
void turn(const T* const* keys, int rows, int d, float* panel) {
#if defined(__AVX512F__)
  for (int i = 0; i < d; i += 16) {
    f16v m[16] = {};
    const int some = d - i < 16 ? d - i : 16;
    for (int r = 0; r < rows; r++) m[r] = some < 16 ? load_eight(keys[r] + i) : load_wide(keys[r] + i);
    transpose16(m);
    for (int j = 0; j < some; j++) store_as(panel + (int64_t)(i + j) * kPanelKeys, m[j]);
  }
#else
  for (int i = 0; i < d; i++) {
    float* to = panel + (int64_t)i * kPanelKeys;
    for (int r = 0; r < rows; r++) to[r] = as_float(keys[r][i]);
    for (int r = rows; r < 16; r++) to[r] = 0;
  }
#endif
}

}  // namespace

VectorTiles::VectorTiles(Carver& carver, int head_dim, int value_dim)
    : d_(head_dim), value_dim_(value_dim), width_((int)round_up(value_dim, 16)) {
  panels_ = carver.take<float>(kKeyBlock * d_);
  values_ = carver.take<float>(kKeyBlock * width_);
  scores_ = carver.take<float>(kRows * kScoresStride);
}

template <class T>
void VectorTiles::pack_query(const T* from, float* to) const {
  unpack(from, d_, to);
}

template <class T>
void VectorTiles::pack(int at, const T* const* keys, const T* const* values, int count) const {
  const int rows = count < 16 ? count : 16;
  turn(keys, rows, d_, panels_ + at / kPanelKeys * kPanelKeys * d_ + at % kPanelKeys);
  for (int r = 0; r < rows; r++) {
    float* to = values_ + (int64_t)(at + r) * width_;
    unpack(values[r], value_dim_, to);
    for (int i = value_dim_; i < width_; i++) to[i] = 0;
  }
}

template void VectorTiles::pack_query(const float*, float*) const;
template void VectorTiles::pack_query(const uint16_t*, float*) const;
template void VectorTiles::pack(int, const float* const*, const float* const*, int) const;
template void VectorTiles::pack(int, const uint16_t* const*, const uint16_t* const*, int) const;

void VectorTiles::attend(const QueryTile<float>& tile, int start, int from, int count, const Scoring& scoring) const {
  static_assert(kKeyStep % kPanelKeys == 0);
  const bool begins = tile.begins(start);
  for (int key = from; key < count; key += kPanelKeys) {
    int vectors = (int)round_up(count - key < kPanelKeys ? count - key : kPanelKeys, 16) / 16;
    tile_of<false>(vectors, tile.q, d_, panels_ + (int64_t)key * d_, kPanelKeys, d_, scores_ + key, kScoresStride);
  }
  for (int r = 0; r < kRows; r++) {
    float* scores = scores_ + r * kScoresStride;
    float shrink = weigh(scores, from, tile.first[r] - start, tile.seen[r] - start, count, 1, scoring, tile.softmax[r],
                         tile.begins(start, r), [=](int at, f16v weight) { store_as(scores + at, weight); });
    if (begins || shrink == 1.0f) continue;
    for (int i = 0; i < width_; i++) tile.sums[r * width_ + i] *= shrink;
  }
  for (int column = 0; column < width_; column += kPanelKeys) {
    int vectors = (width_ - column < kPanelKeys ? width_ - column : kPanelKeys) / 16;
    (begins ? tile_of<false> : tile_of<true>)(vectors, scores_ + from, kScoresStride,
                                              values_ + (int64_t)from * width_ + column, width_, count - from,
                                              tile.sums + column, width_);
  }
}

}  // namespace mm
