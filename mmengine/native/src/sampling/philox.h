// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011). Computes the random
// words of 64 tokens at once, in the order of mmengine/runtime/sampling/gumbel.py.
#pragma once

#include <immintrin.h>

#include "common/vec.h"

namespace mm {

struct PhiloxKey {
  uint32_t low, high, output, sample;  // low and high bits of the seed; output index; sample index
};

constexpr int PHILOX_ROUNDS = 10;
constexpr uint32_t PHILOX_M0 = 0xD2511F53, PHILOX_M1 = 0xCD9E8D57;
constexpr uint32_t PHILOX_W0 = 0x9E3779B9, PHILOX_W1 = 0xBB67AE85;

#if defined(__AVX512F__)
typedef __m512i Words;
MM_INLINE Words all(uint32_t x) { return _mm512_set1_epi32((int)x); }
MM_INLINE Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
MM_INLINE Words exclusive(Words a, Words b) { return _mm512_xor_si512(a, b); }
MM_INLINE void multiply(Words x, uint32_t by, Words* high, Words* low) {
  Words m = all(by), even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
  *high = _mm512_mask_blend_epi32(0xAAAA, _mm512_shuffle_epi32(even, (_MM_PERM_ENUM)0xF5), odd);
  *low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_shuffle_epi32(odd, (_MM_PERM_ENUM)0xA0));
}
#define MM_UNPACK(what, a, b) _mm512_unpack##what(a, b)
// Lane 4 L + j computes block 4 j + L, so that the transposition in philox_lanes gives the tokens in order.
MM_INLINE Words lane_blocks() { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }
#else
typedef __m256i Words;
MM_INLINE Words all(uint32_t x) { return _mm256_set1_epi32((int)x); }
MM_INLINE Words add(Words a, Words b) { return _mm256_add_epi32(a, b); }
MM_INLINE Words exclusive(Words a, Words b) { return _mm256_xor_si256(a, b); }
MM_INLINE void multiply(Words x, uint32_t by, Words* high, Words* low) {
  Words m = all(by), even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
  *high = _mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xF5), odd, 0xAA);
  *low = _mm256_blend_epi32(even, _mm256_shuffle_epi32(odd, 0xA0), 0xAA);
}
#define MM_UNPACK(what, a, b) _mm256_unpack##what(a, b)
MM_INLINE Words lane_blocks() { return _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7); }
#endif

constexpr int WORD_LANES = sizeof(Words) / 4;

MM_INLINE void philox_lanes(const PhiloxKey& key, uint32_t first_block, uint32_t* bits) {
  Words x0 = add(all(first_block), lane_blocks()), x1 = all(key.output), x2 = all(key.sample), x3 = all(0);
  uint32_t k0 = key.low, k1 = key.high;
  for (int round = 0; round < PHILOX_ROUNDS; round++) {
    Words high0, low0, high1, low1;
    multiply(x0, PHILOX_M0, &high0, &low0);
    multiply(x2, PHILOX_M1, &high1, &low1);
    x0 = exclusive(exclusive(high1, x1), all(k0));
    x2 = exclusive(exclusive(high0, x3), all(k1));
    x1 = low1;
    x3 = low0;
    k0 += PHILOX_W0;
    k1 += PHILOX_W1;
  }
  Words a = MM_UNPACK(lo_epi32, x0, x1), b = MM_UNPACK(hi_epi32, x0, x1);
  Words c = MM_UNPACK(lo_epi32, x2, x3), d = MM_UNPACK(hi_epi32, x2, x3);
  store_as(bits + 0 * WORD_LANES, MM_UNPACK(lo_epi64, a, c));
  store_as(bits + 1 * WORD_LANES, MM_UNPACK(hi_epi64, a, c));
  store_as(bits + 2 * WORD_LANES, MM_UNPACK(lo_epi64, b, d));
  store_as(bits + 3 * WORD_LANES, MM_UNPACK(hi_epi64, b, d));
}

// 32 random bits for each of the tokens first_token to first_token + 63; first_token is a multiple of 64.
MM_INLINE void philox_bits(const PhiloxKey& key, uint32_t first_token, uint32_t* bits) {
  for (int done = 0; done < 64; done += 4 * WORD_LANES) philox_lanes(key, (first_token + done) / 4, bits + done);
}

}  // namespace mm
