// Multiplies float32 rows with GGUF's blocks, and decodes blocks, with AVX2. CPUs with AVX-512 use this code too.
#include "linear/blocks.h"

#include "linear/blocks_avx2.h"

namespace mm {
namespace {

// Stores weights to a float32 panel.
struct ToTile {
  float* tile;

  template <int K>
  MM_INLINE_MEMBER int at() const {
    return 0;
  }
  MM_INLINE_MEMBER void put(int, int k, int eight, __m256 weights) const {
    store_as(tile + k * 32 + eight * 8, weights);
  }
};

// Adds the products with a row of x to sums.
struct ToSums {
  const float* x;
  __m256 (&sums)[kEights];

  template <int K>
  MM_INLINE_MEMBER __m256 at() const {
    return _mm256_broadcast_ss(x + K);
  }
  MM_INLINE_MEMBER void put(__m256 x, int, int eight, __m256 weights) const {
    sums[eight] = _mm256_fmadd_ps(x, weights, sums[eight]);
  }
};

template <int TYPE>
void decode(const char* panel, int64_t t, int64_t count, float* tile) {
  constexpr BlockForm F = block_form(TYPE);
  for (int64_t at = t; at < t + count; at += 32, tile += 32 * 32) {
    const char* block = panel + at / F.span * F.block_bytes();
    const char* step = block + F.heads * 32 + at % F.span / 32 * F.step_bytes();
    for (int line = 0; line < F.step_bytes(); line += 64) fetch_ahead<8192, 1024>(step + line);
    StepDecoder<TYPE>(block, step).run(ToTile{tile});
  }
}

template <int TYPE>
void multiply_row(const char* panel, const float* x, int64_t k, float* c) {
  constexpr BlockForm F = block_form(TYPE);
  __m256 sums[kEights] = {};
  for (int64_t i = 0; i < k; i += F.span, panel += F.block_bytes()) {
    const char* step = panel + F.heads * 32;
    for (int t = 0; t < F.span; t += 32, x += 32, step += F.step_bytes()) {
      for (int line = 0; line < F.step_bytes(); line += 64) fetch_ahead<8192, 1024>(step + line);
      StepDecoder<TYPE>(panel, step).run(ToSums{x, sums});
    }
  }
  for (int eight = 0; eight < kEights; ++eight) store_as(c + eight * 8, sums[eight]);
}

template <int TYPE>
struct Decode {
  static void run(const char* panel, int64_t t, int64_t count, float* tile) { decode<TYPE>(panel, t, count, tile); }
};
template <int TYPE>
struct MultiplyRow {
  static void run(const char* panel, const float* x, int64_t k, float* c) { multiply_row<TYPE>(panel, x, k, c); }
};

}  // namespace

void block_decode(int type, const char* panel, int64_t t, int64_t count, float* tile) {
  for_block_type<Decode>(type, panel, t, count, tile);
}

void block_multiply_row(int type, const char* panel, const float* x, int64_t k, float* c) {
  for_block_type<MultiplyRow>(type, panel, x, k, c);
}

}  // namespace mm
