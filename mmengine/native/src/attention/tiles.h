// Attention from a tile of queries to a block of keys: packing, scores, softmax and weighted sums of values.
//
// VectorTiles computes in float32; bfloat16 is widened when it is packed. PairTiles has the same interface and
// multiplies bfloat16 pairs with AMX or AVX-512. A query's result does not depend on the tile's other queries.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "attention/softmax.h"
#include "common/wide_vec.h"

namespace mm {

constexpr int kMaxHead = 512;   // largest head size
constexpr int kKeyBlock = 512;  // keys in a block, which are packed and scored together
constexpr int kKeyStep = 64;    // keys at a block's start are skipped in multiples of this
constexpr int kScoresStride = kKeyBlock + 16;  // padded, because rows at a power-of-two distance share cache sets

// The queries of one tile, and their running softmax and sums over the previous blocks of keys.
template <class Query>
struct QueryTile {
  const Query* q;  // [kRows, q_width]
  float* sums;     // [kRows, width]
  RunningSoftmax* softmax;  // [kRows]
  // [kRows] each query sees the row's keys [first, seen); both arrays are non-decreasing
  const int *first, *seen;
  bool has_sinks;  // the running softmax is initialised with a sink

  // begins(start) is true if the block at key `start` initialises the sums, because no earlier block has keys for the
  // tile. begins(start, r) is true if no sink and no earlier block has initialised the softmax of query r.
  MM_INLINE_MEMBER bool begins(int start) const { return start <= first[0]; }
  MM_INLINE_MEMBER bool begins(int start, int r) const { return !has_sinks && start <= first[r]; }
};

class VectorTiles {
 public:
  using Query = float;
  static constexpr int kRows = 6;
  static constexpr int kPack = 16;  // the number of packed keys is rounded up to a multiple of this

  VectorTiles(Carver& carver, int head_dim, int value_dim);
  int q_width() const { return d_; }
  int width() const { return width_; }

  void begin() const {}
  void end() const {}
  template <class T>
  void pack_query(const T* from, float* to) const;
  // Packs keys and values [at, at + 16) of the block. Only the first `count` of the 16 pointers may be read.
  template <class T>
  void pack(int at, const T* const* keys, const T* const* values, int count) const;
  // Attends to the keys [from, count) of a block, whose first key has index `start` in the row. `from` is a multiple of
  // kKeyStep. The first block with keys for a query of the tile initialises the sums.
  void attend(const QueryTile<float>& tile, int start, int from, int count, const Scoring& scoring) const;

 private:
  int d_, value_dim_, width_;
  float* panels_;  // keys [kKeyBlock / kPanelKeys][d][kPanelKeys]
  float* values_;  // [kKeyBlock, width]
  float* scores_;  // [kRows, kScoresStride]
};

#if defined(__AVX512BF16__)
// Keys are stored in tiles of 32 values by 16 keys, and values in tiles of 32 keys by 16 values. Rows of a tile are
// interleaved in pairs for the multiply instructions. Weights are rounded to bfloat16, as in torch.
class PairTiles {
 public:
  using Query = uint16_t;
#if defined(__AMX_BF16__)
  static constexpr int kRows = 32;  // two tiles
#else
  static constexpr int kRows = 6;  // 6 rows with 4 vectors each: 24 sums in 32 registers
#endif
  static constexpr int kPack = 32;

  PairTiles(Carver& carver, int head_dim, int value_dim);
  int q_width() const { return steps_ * 32; }
  int width() const { return panels_ * 16; }

  void begin() const;  // configures this thread's tile registers
  void end() const;    // releases the tile registers
  void pack_query(const uint16_t* from, uint16_t* to) const;
  void pack(int at, const uint16_t* const* keys, const uint16_t* const* values, int count) const;
  void attend(const QueryTile<uint16_t>& tile, int start, int from, int count, const Scoring& scoring) const;

 private:
  static constexpr int kTile = 512;  // values per tile
  static constexpr int kWeightsStride = kKeyBlock + 32;

  void score(const uint16_t* q, int from, int count) const;
  void mix(int from, int count, bool begins, float* sums) const;  // sums (+)= weights * v

  int d_, value_dim_, steps_, panels_;  // steps of 32 and panels of 16 values
  uint16_t* keys_;     // [kKeyBlock / 16][steps][16 pairs of values][16 keys][2]
  uint16_t* values_;   // [kKeyBlock / 32][panels][16 pairs of keys][16 values][2]
  float* scores_;      // [kRows, kScoresStride]
  uint16_t* weights_;  // [kRows, kWeightsStride]
};
using Bf16Tiles = PairTiles;
#else
using Bf16Tiles = VectorTiles;
#endif

typedef float f8v __attribute__((vector_size(32)));

// Eight values, padded with zeros if a register is wider.
MM_INLINE wide load_eight(const float* from) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(load_as<f8v>(from), f8v{}, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  return load_wide(from);
#endif
}
MM_INLINE wide load_eight(const uint16_t* from) {
#if defined(__AVX512F__)
  return widen((h16v)_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)from)));
#else
  return load_wide(from);
#endif
}

#if defined(__AVX512F__)
// Transposes a 16 x 16 matrix. Interleaving the upper with the lower half rotates the 8 bits of an element's index by
// one; after four rotations, row and column are swapped.
MM_INLINE void transpose16(f16v m[16]) {
#pragma GCC unroll 4
  for (int turn = 0; turn < 4; turn++) {
    f16v to[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      to[2 * i] = __builtin_shufflevector(m[i], m[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      to[2 * i + 1] =
          __builtin_shufflevector(m[i], m[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) m[i] = to[i];
  }
}
#endif

}  // namespace mm
