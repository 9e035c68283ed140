// Codes of a panel for AVX2, in blocks of 32 bytes.
//
//     FP8   [group / 4][4 eights of columns][2 fours of them][2 pairs of k][4 columns][2]
//     int8  [group / 4][4 eights of columns][4 of k][8 columns]
//     int4  [group / 4][2 sixteens of columns][2 fours of each eight][2 eights][4 columns][2 of k], + 8: the low half
//           of a byte belongs to k, the high half to k + 2
//
// Interleaving the bytes in each 16 bytes gives bfloat16 pairs for FP8 and int4. 16 bytes of int4 hold columns 0 to 3
// and 8 to 11 of sixteen, or the other columns. A 32-bit word of int4 has two columns. Masks separate the 4 values of k
// as the codes times 1, 2^8, 2^4 and 2^12. For a single row, x is divided by these factors (kMaskedBy), because table
// lookups would take 1.5 times as long. The offset 8 is subtracted after the product, as a min.
//
// For e4m3, the mantissa of bfloat16(code * scale) depends only on the code's mantissa and lowest exponent bit. These 4
// bits index a table of 16 values. The higher exponent bits are added to the result. So a stored byte has the sign, the
// 4 index bits, and the higher exponent bits. Subnormals do not follow this rule. Subnormals with magnitudes 4 to 7 are
// stored as normal numbers with exponent 0. Smaller subnormals and zero are stored with exponent 0 and an odd mantissa.
// A slower, exact function decodes these `odd` codes. The sign of a stored scale marks odd codes: each sign covers 4
// values of k (8 in groups above 128). A negative scale therefore moves its sign to its codes.
#pragma once

#include <immintrin.h>

#include "common/wide_vec.h"
#include "linear/job.h"

namespace mm {

MM_INLINE __m256i twice(__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); }

// Returns bfloat16(value) in the low bits of 32-bit lanes. NaN is not handled.
MM_INLINE __m256i rounded_bits(__m256 value) {
  const __m256i bits = (__m256i)value, lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lowest), 16);
}

// Converts an e4m3 code to the stored byte described above.
inline uint8_t stored_fp8(uint8_t code) {
  if (!(code & 0x78)) code = (code & 0x80) | (code & 4 ? 2 * (code & 3) : 2 * (code & 3) + 1);
  return (code & 0x80) | (code & 15) << 3 | (code >> 4 & 7);
}
inline bool is_odd(uint8_t stored) { return (stored & 0x4f) == 8; }

// odd_span: number of values of k that a sign covers. odd_place: index of the scale whose sign covers position t of a
// group.
inline int odd_span(int64_t group) { return group > 128 ? 8 : 4; }
inline int odd_place(int64_t group, int64_t t) { return (int)(t / odd_span(group)); }

// The interface of the decoders below. They decode 128 bytes of a group (kDeep values of k) at a time, in registers:
//   lines()        decodes to the layout of a bfloat16 panel
//   add()          multiplies with a single row and adds to sums, which ordered() then sorts by column
//   kScaled        whether codes are multiplied by their scales here; otherwise the sums are scaled after the product
//   known_until()  returns where the normal codes from t on end
//   odd_until()    returns where the odd codes from t on end; EXACT decodes odd codes

// Base class of decoders for codes with 8 columns in 32 bytes. The derived class's pairs() decodes eight columns to
// bfloat16 pairs, and values() to float32.
template <class Codes>
struct Eights {
  static constexpr int kDeep = 4;

  template <bool EXACT>
  MM_INLINE_MEMBER void lines(const char* at, char* tile) const {
#pragma GCC unroll 4
    for (int eight = 0; eight < 4; ++eight) {
      __m256i pairs[kDeep / 2];
      ((const Codes*)this)->template pairs<EXACT>(at + eight * 32, eight, pairs);
      for (int pair = 0; pair < kDeep / 2; ++pair) store_as(tile + pair * 128 + eight * 32, pairs[pair]);
    }
  }

  template <bool EXACT>
  MM_INLINE_MEMBER void add(const char* at, const float* x, __m256 (&sums)[4]) const {
#pragma GCC unroll 4
    for (int eight = 0; eight < 4; ++eight) {
      __m256 values[kDeep];
      ((const Codes*)this)->template values<EXACT>(at + eight * 32, eight, values);
#pragma GCC unroll 4
      for (int i = 0; i < kDeep; ++i) sums[eight] = _mm256_fmadd_ps(_mm256_broadcast_ss(x + i), values[i], sums[eight]);
    }
  }

  static void ordered(__m256 (&)[4]) {}
};

struct Fp8Codes : Eights<Fp8Codes> {
  static constexpr bool kScaled = true;
  __m256i low[2], high[2];  // tables for 16 columns each, with a 4-bit index
  const float* scales;
  uint32_t odd;
  int size;
  bool fit;

  MM_INLINE_MEMBER Fp8Codes(const mm_linear& linear, const char* group)
      : scales((const float*)group), size(linear.group) {
    const __m256 absolute = (__m256)_mm256_set1_epi32(0x7fffffff);
    __m256 each[4];
    odd = 0, fit = true;
    for (int eight = 0; eight < 4; ++eight) {
      each[eight] = load_as<__m256>(scales + eight * 8);
      odd |= (uint32_t)_mm256_movemask_ps(each[eight]) << (eight * 8);
      each[eight] = _mm256_and_ps(each[eight], absolute);
    }
    for (int half = 0; half < 2; ++half) {
      const float scale = each[half * 2][0];
      const __m256 all = _mm256_set1_ps(scale);
      const __m256 same = _mm256_and_ps(_mm256_cmp_ps(each[half * 2], all, _CMP_EQ_OQ),
                                        _mm256_cmp_ps(each[half * 2 + 1], all, _CMP_EQ_OQ));
      // These bounds exclude subnormal results and overflow.
      fit = fit && _mm256_movemask_ps(same) == 0xff && scale > 1e-30f && scale < 1e30f;
      set_table(half, scale);
    }
  }

  MM_INLINE_MEMBER void set_table(int half, float scale) {
    const __m256 least = _mm256_setr_ps(1.0f, 1.125f, 1.25f, 1.375f, 1.5f, 1.625f, 1.75f, 1.875f);
    const __m256i first = rounded_bits(least * 0x1p-7f * scale), second = rounded_bits(least * 0x1p-6f * scale);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
    const __m256i seconds = _mm256_and_si256(words, _mm256_set1_epi16(255));
    const __m256i bytes = _mm256_packus_epi16(seconds, _mm256_srli_epi16(words, 8));
    const __m256i apart = _mm256_permute4x64_epi64(bytes, 0xd8);
    low[half] = _mm256_permute2x128_si256(apart, apart, 0x00);
    high[half] = _mm256_permute2x128_si256(apart, apart, 0x11);
  }

  MM_INLINE_MEMBER int known_until(int t) const {
    if (!fit) return t;
    const uint32_t left = (uint32_t)((uint64_t)odd >> odd_place(size, t));
    return left ? t + __builtin_ctz(left) * odd_span(size) : size;
  }
  MM_INLINE_MEMBER int odd_until(int t) const { return fit ? t + odd_span(size) : size; }

  template <bool EXACT>
  MM_INLINE_MEMBER void pairs(const char* at, int eight, __m256i (&out)[2]) const {
    if constexpr (EXACT) return exact(at, scales + eight * 8, out);
    const __m256i codes = load_as<__m256i>(at), rest = _mm256_and_si256(codes, _mm256_set1_epi8(-121));
    const __m256i places = _mm256_and_si256(_mm256_srli_epi16(codes, 3), _mm256_set1_epi8(15));
    const __m256i second = _mm256_shuffle_epi8(low[eight / 2], places);
    const __m256i first = _mm256_add_epi8(_mm256_shuffle_epi8(high[eight / 2], places), rest);
    out[0] = _mm256_unpacklo_epi8(second, first), out[1] = _mm256_unpackhi_epi8(second, first);
  }

  template <bool EXACT>
  MM_INLINE_MEMBER void values(const char* at, int eight, __m256 (&out)[kDeep]) const {
    __m256i both[2];
    pairs<EXACT>(at, eight, both);
    for (int pair = 0; pair < 2; ++pair) out[pair * 2] = even_of(both[pair]), out[pair * 2 + 1] = odd_of(both[pair]);
  }

  // Decodes any code, also subnormals: converts the code as float16 bits and multiplies by 256 = 2^(15 - 7), because
  // the exponent biases are 15 and 7.
  __attribute__((noinline)) static void exact(const char* at, const float* scales, __m256i (&out)[2]) {
    const __m256i codes = load_as<__m256i>(at), sign = _mm256_set1_epi8(-128);
    const __m256i below = _mm256_and_si256(_mm256_srli_epi16(codes, 3), _mm256_set1_epi8(15));
    const __m256i above = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi8(112));
    __m256i stored = _mm256_or_si256(_mm256_and_si256(codes, sign), _mm256_or_si256(above, below)), bits[2][2];
    const __m256i least = _mm256_cmpeq_epi8(_mm256_and_si256(stored, _mm256_set1_epi8(0x78)), _mm256_setzero_si256());
    const __m256i subnormals = twice(_mm_setr_epi8(4, 0, 5, 1, 6, 2, 7, 3, 4, 0, 5, 1, 6, 2, 7, 3));
    const __m256i mantissa = _mm256_and_si256(stored, _mm256_set1_epi8(7));
    const __m256i small = _mm256_or_si256(_mm256_and_si256(stored, sign), _mm256_shuffle_epi8(subnormals, mantissa));
    stored = _mm256_blendv_epi8(stored, small, least);
    for (int four = 0; four < 2; ++four) {
      const __m128i part = four ? _mm256_extracti128_si256(stored, 1) : _mm256_castsi256_si128(stored);
      const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(part), 7);
      const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbf80));
      const __m256 by =
          _mm256_and_ps(_mm256_broadcast_ps((const __m128*)(scales + four * 4)), (__m256)_mm256_set1_epi32(0x7fffffff));
      const __m256 spread = _mm256_permutevar_ps(by, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
      for (int pair = 0; pair < 2; ++pair) {
        const __m128i eight = pair ? _mm256_extracti128_si256(halves, 1) : _mm256_castsi256_si128(halves);
        bits[pair][four] = rounded_bits(_mm256_cvtph_ps(eight) * 256.0f * spread);
      }
    }
    for (int pair = 0; pair < 2; ++pair)
      out[pair] = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits[pair][0], bits[pair][1]), 0xd8);
  }
};

struct Int8Codes : Eights<Int8Codes> {
  static constexpr bool kScaled = false;

  int size;

  MM_INLINE_MEMBER Int8Codes(const mm_linear& linear, const char*) : size(linear.group) {}
  MM_INLINE_MEMBER int known_until(int) const { return size; }
  MM_INLINE_MEMBER int odd_until(int t) const { return t; }

  template <bool>
  MM_INLINE_MEMBER void values(const char* at, int, __m256 (&out)[kDeep]) const {
    for (int t = 0; t < kDeep; ++t)
      out[t] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(at + t * 8))));
  }
  template <bool>
  MM_INLINE_MEMBER void pairs(const char* at, int eight, __m256i (&out)[2]) const {
    __m256 each[kDeep];
    values<false>(at, eight, each);
    for (int pair = 0; pair < 2; ++pair)
      out[pair] = _mm256_or_si256(_mm256_srli_epi32((__m256i)each[pair * 2], 16), (__m256i)each[pair * 2 + 1]);
  }
};

// Codes 0 to 15; the offset 8 is subtracted after the product.
struct Int4Codes {
  static constexpr int kDeep = 8;
  static constexpr bool kScaled = false;

  int size;

  MM_INLINE_MEMBER Int4Codes(const mm_linear& linear, const char*) : size(linear.group) {}
  MM_INLINE_MEMBER int known_until(int) const { return size; }
  MM_INLINE_MEMBER int odd_until(int t) const { return t; }

  // The tables `high` and `low` hold the two bytes of the bfloat16 values 0 to 15.
  template <bool>
  MM_INLINE_MEMBER void lines(const char* at, char* tile) const {
    const __m256i high = twice(_mm_setr_epi8(0, 63, 64, 64, 64, 64, 64, 64, 65, 65, 65, 65, 65, 65, 65, 65));
    const __m256i low = twice(_mm_setr_epi8(0, -128, 0, 64, -128, -96, -64, -32, 0, 16, 32, 48, 64, 80, 96, 112));
    const __m256i four = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int place = 0; place < 4; ++place) {
      const __m256i codes = load_as<__m256i>(at + place * 32);
      const __m256i parts[2] = {_mm256_and_si256(codes, four), _mm256_and_si256(_mm256_srli_epi16(codes, 4), four)};
      char* to = tile + place / 2 * 256 + place % 2 * 64;
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part, to += 128) {
        const __m256i second = _mm256_shuffle_epi8(low, parts[part]), first = _mm256_shuffle_epi8(high, parts[part]);
        store_as(to, _mm256_unpacklo_epi8(second, first));
        store_as(to + 32, _mm256_unpackhi_epi8(second, first));
      }
    }
  }

  template <bool>
  MM_INLINE_MEMBER void add(const char* at, const float* x, __m256 (&sums)[4]) const {
    constexpr int masks[] = {0x000f, 0x0f00, 0x00f0, 0xf000};
#pragma GCC unroll 4
    for (int place = 0; place < 4; ++place) {
      const __m256i words = load_as<__m256i>(at + place * 32);
      const __m256i columns[2] = {words, _mm256_srli_epi32(words, 16)};
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          __m256& sum = sums[place % 2 * 2 + i];
          const __m256i code = _mm256_and_si256(columns[i], _mm256_set1_epi32(masks[t]));
          sum = _mm256_fmadd_ps(_mm256_broadcast_ss(x + place / 2 * 4 + t), _mm256_cvtepi32_ps(code), sum);
        }
    }
  }

  MM_INLINE_MEMBER static void ordered(__m256 (&sums)[4]) {
    for (int half = 0; half < 2; ++half) {
      const __m256 one = sums[half * 2], other = sums[half * 2 + 1];
      sums[half * 2] = _mm256_unpacklo_ps(one, other), sums[half * 2 + 1] = _mm256_unpackhi_ps(one, other);
    }
  }
};

}  // namespace mm
