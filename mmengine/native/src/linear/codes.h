// Codes of a panel, and the values that they encode.
//
// With VBMI, one-byte codes are laid out as [group / 4][2 halves][4][2 pairs of k][4 columns][2]. A cache line has two
// pairs of k for half of the columns. Interleaving the bytes gives the bfloat16 layout (linear/job.h). int8 is stored
// as sign and magnitude, like e4m3, so both use lookup tables with 128 entries.
//
// With VBMI, int4 is laid out as [group / 4][16 columns][2 of a pair], in 16-bit words with four numbers (code + 8).
// From the low bits up, a word has columns c and c + 16 of the first pair of k, then of the second pair. Cache lines of
// two neighbouring panels alternate (linear/job.h). With AMX, only e4m3 has the layout described here;
// linear/codes_amx.h describes int8 and int4.
//
// Without VBMI, AVX-512 kernels convert codes to float32. One-byte codes are laid out as [group][32 columns]. int4 is
// laid out as [group / 2][32 columns], as code + 8, with the first value in a byte's low half. linear/codes_avx2.h
// describes the layout for AVX2.
#pragma once

#include <immintrin.h>

#include "common/fetch.h"
#include "common/vec.h"
#include "linear/job.h"

namespace mm {

// Converts float16 to float32.
MM_INLINE f16v from_halves(__m256i bits) {
#if defined(__AVX512F__)
  return (f16v)_mm512_cvtph_ps(bits);
#else
  struct {
    __m256 low, high;
  } both = {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  return load_as<f16v>(&both);
#endif
}

// Scales and mins of a group, for its 32 columns.
struct Scales {
  f16v scales[2], mins[2];

  Scales() = default;

  MM_INLINE_MEMBER Scales(const mm_linear& linear, const char* group) : mins{} {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      if (linear.form == MM_FP8)
        scales[half] = load_as<f16v>(group + half * 64);
      else
        scales[half] = from_halves(load_as<__m256i>(group + half * 32));
      if (linear.mins) mins[half] = load_as<f16v>(group + placed(linear, mins_at(linear) + half * 64));
    }
  }
};

#if defined(__AVX512F__) && !defined(__AMX_BF16__)
// Decodes a group to `group` / 32 steps of bfloat16(code * scale + min).
void decode_weights(const mm_linear& linear, const char* group, char* out);

// Decodes a group to steps of bfloat16 with the unscaled codes.
void decode_codes(const mm_linear& linear, const char* group, char* out);
#endif

// Returns the weight, code * scale + min in float32, of one column at position t of a group.
float decode_one(const mm_linear& linear, const char* group, int column, int64_t t);

// Stores `count` codes (as in mm_linear_pack) of a column, with their scale and min, in a zeroed group.
void encode_column(const mm_linear& linear, char* group, int column, const uint8_t* codes, int64_t count, float scale,
                   float min);

#if defined(__AVX512VBMI__)
// Tables for decoding: e4m3 magnitudes as float32, int8 magnitudes as low and high bytes of bfloat16, int4 values as
// bfloat16, and permutation indices.
struct CodeValues {
  alignas(64) float fp8[128];
  alignas(64) uint16_t int4[32];
  alignas(64) uint8_t int8_low[128], int8_high[128];
  alignas(64) uint8_t even[64], odd[64];
  alignas(64) uint16_t interleaved[32];  // interleaves the two halves of a vector
  CodeValues();
  static const CodeValues all;
};

// High and low bytes of the bfloat16 values of 128 codes.
struct CodeTable {
  __m512i high[2], low[2];

  CodeTable() = default;

  // A table of the e4m3 values times a scale.
  MM_INLINE_MEMBER explicit CodeTable(__m512 scale) {
    const CodeValues& values = CodeValues::all;
    __m512i even = load_as<__m512i>(values.even), odd = load_as<__m512i>(values.odd);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      __m512 v[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) v[j] = _mm512_mul_ps(load_as<__m512>(values.fp8 + i * 64 + j * 16), scale);
      __m512i first = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]), second = (__m512i)_mm512_cvtne2ps_pbh(v[3], v[2]);
      low[i] = _mm512_permutex2var_epi8(first, even, second);
      high[i] = _mm512_permutex2var_epi8(first, odd, second);
    }
  }

  // Decodes 16 columns of two pairs of k.
  MM_INLINE_MEMBER void decode(const char* codes, __m512i& first, __m512i& second) const {
    __m512i code = load_as<__m512i>(codes);
    __m512i below = _mm512_permutex2var_epi8(low[0], code, low[1]);
    __m512i above = _mm512_permutex2var_epi8(high[0], code, high[1]);
    above = _mm512_ternarylogic_epi32(above, code, _mm512_set1_epi8((char)0x80), 0x78);  // a scale may be negative
    first = _mm512_unpacklo_epi8(below, above);
    second = _mm512_unpackhi_epi8(below, above);
  }
};

// Decoders of a group in registers. `pairs` decodes two pairs of k: the left 16 columns to `low`, the right 16 columns
// to `high`. Two pairs take kBytes; the next two pairs begin kNext bytes later. FP8 codes are scaled here. This
// requires that each 16 columns share a scale (`fit`), as in files with block scales.
struct Fp8Codes {
  static constexpr int kBytes = 128, kNext = 128;
  CodeTable of[2];

  MM_INLINE_MEMBER explicit Fp8Codes(const char* group)
      : of{CodeTable(_mm512_set1_ps(load_as<float>(group))), CodeTable(_mm512_set1_ps(load_as<float>(group + 64)))} {}

  MM_INLINE_MEMBER static bool fit(const char* group) {
    __m512 left = load_as<__m512>(group), right = load_as<__m512>(group + 64);
    return _mm512_cmpeq_ps_mask(left, _mm512_set1_ps(left[0])) == 0xffff &&
           _mm512_cmpeq_ps_mask(right, _mm512_set1_ps(right[0])) == 0xffff;
  }

  MM_INLINE_MEMBER void pairs(const char* codes, __m512i (&low)[2], __m512i (&high)[2]) const {
    of[0].decode(codes, low[0], low[1]);
    of[1].decode(codes + 64, high[0], high[1]);
  }
};

#if !defined(__AMX_BF16__)
struct Int8Codes {
  static constexpr int kBytes = 128, kNext = 128;
  CodeTable of;

  MM_INLINE_MEMBER explicit Int8Codes(const char*) {
    const CodeValues& values = CodeValues::all;
    for (int i = 0; i < 2; ++i) {
      of.low[i] = load_as<__m512i>(values.int8_low + i * 64);
      of.high[i] = load_as<__m512i>(values.int8_high + i * 64);
    }
  }

  MM_INLINE_MEMBER static bool fit(const char*) { return true; }

  MM_INLINE_MEMBER void pairs(const char* codes, __m512i (&low)[2], __m512i (&high)[2]) const {
    of.decode(codes, low[0], low[1]);
    of.decode(codes + 64, high[0], high[1]);
  }
};

// The lookup uses 5 bits, but the fifth bit belongs to the next code. So the table has its 16 values twice.
struct Int4Codes {
  static constexpr int kBytes = 64, kNext = 128;
  __m512i values;

  MM_INLINE_MEMBER explicit Int4Codes(const char*) : values(load_as<__m512i>(CodeValues::all.int4)) {}

  MM_INLINE_MEMBER static bool fit(const char*) { return true; }

  MM_INLINE_MEMBER void pairs(const char* codes, __m512i (&low)[2], __m512i (&high)[2]) const {
    __m512i words = load_as<__m512i>(codes);
    low[0] = _mm512_permutexvar_epi16(words, values);
    high[0] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), values);
    low[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), values);
    high[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), values);
  }
};

// Decodes a group to steps of bfloat16.
template <class Codes>
MM_INLINE void decode_pairs(const mm_linear& linear, const char* group, char* out) {
  const Codes found(group);
  const char* codes = group + placed(linear, codes_at(linear));
  for (int t = 0; t < linear.group; t += 4, codes += Codes::kNext, out += 256) {
    __m512i low[2], high[2];
    found.pairs(codes, low, high);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      store_as(out + pair * 128, low[pair]);
      store_as(out + pair * 128 + 64, high[pair]);
    }
  }
}
#endif
#elif defined(__AVX512F__)
// Decoders of neighbouring columns to float32. `two` decodes two values of k; the next two follow kBytes later.
typedef f16v columns;
MM_INLINE columns from_bytes(const char* at) {
  return (columns)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(at)));
}
MM_INLINE columns from_fp8_bits(const char* at) {
  __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_as<__m128i>(at)), 7);
  return from_halves(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbf80)));
}
MM_INLINE void from_nibbles(const char* at, columns& first, columns& second) {
  __m512i both = _mm512_cvtepu8_epi32(load_as<__m128i>(at)), eight = _mm512_set1_epi32(8);
  first = (columns)_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(both, _mm512_set1_epi32(15)), eight));
  second = (columns)_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(both, 4), eight));
}
constexpr int kColumns = sizeof(columns) / 4;

struct Fp8Codes {
  static constexpr int kBytes = 64;

  // Times 2^(15 - 7), because float16's exponent bias is 15 and e4m3's is 7.
  MM_INLINE_MEMBER static columns one(const char* codes) { return from_fp8_bits(codes) * 256.0f; }
  MM_INLINE_MEMBER static void two(const char* codes, columns& first, columns& second) {
    first = one(codes), second = one(codes + 32);
  }
};

struct Int8Codes {
  static constexpr int kBytes = 64;

  MM_INLINE_MEMBER static void two(const char* codes, columns& first, columns& second) {
    first = from_bytes(codes), second = from_bytes(codes + 32);
  }
};

struct Int4Codes {
  static constexpr int kBytes = 32;

  MM_INLINE_MEMBER static void two(const char* codes, columns& first, columns& second) {
    from_nibbles(codes, first, second);
  }
};

// Returns bfloat16(value * scale). NaN is not handled.
MM_INLINE columns scaled(columns value, columns scale) {
  typedef uint32_t bits_of __attribute__((vector_size(sizeof(columns))));
  bits_of bits = (bits_of)(value * scale);
  return (columns)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}
#endif

}  // namespace mm
