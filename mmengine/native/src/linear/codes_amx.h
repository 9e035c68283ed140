// Codes of a panel for AMX, and decoders to bfloat16 in the layout of a weight tile.
//
// Integers are stored in the order of a tile's weights. int8 is laid out as [group / 2][32 columns][2]. int4 is laid
// out as [group / 4][16 words]; a word has eight numbers (code + 8). The words' lowest 4 bits have columns 0 to 7 of
// the first pair of k, the next 4 bits have columns 8 to 15, and so on. e4m3 has the layout of linear/codes.h.
#pragma once

#include "linear/codes.h"

#if defined(__AMX_BF16__)

namespace mm {

// Scales and mins of a group. Each vector has 8 columns, and each value twice, for a pair of k.
struct PairScales {
  f16v scales[4], mins[4];

  MM_INLINE_MEMBER PairScales(const mm_linear& linear, const char* group) : PairScales(Scales(linear, group)) {}

  MM_INLINE_MEMBER explicit PairScales(const Scales& by) {
    const __m512i left = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      scales[i] = (f16v)_mm512_permutexvar_ps(i % 2 ? right : left, (__m512)by.scales[i / 2]);
      mins[i] = (f16v)_mm512_permutexvar_ps(i % 2 ? right : left, (__m512)by.mins[i / 2]);
    }
  }

  // Scales and rounds 16 columns of a pair.
  MM_INLINE_MEMBER __m512i rounded(__m512 left, __m512 right, int half) const {
    const f16v low = fused((f16v)left, scales[half * 2], mins[half * 2]);
    const f16v high = fused((f16v)right, scales[half * 2 + 1], mins[half * 2 + 1]);
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }
};

// Decoders of a group. `four` decodes four values of k (kBytes bytes) to scaled weights.
struct Int8Weights {
  static constexpr int kBytes = 128;
  PairScales by;

  MM_INLINE_MEMBER Int8Weights(const mm_linear& linear, const char* group) : by(linear, group) {}

  MM_INLINE_MEMBER static __m512 values(const char* codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(codes)));
  }

  MM_INLINE_MEMBER void four(const char* codes, char* out) const {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, codes += 32)
      store_as(out + i * 64, by.rounded(values(codes), values(codes + 16), i % 2));
  }
};

struct Int4Weights {
  static constexpr int kBytes = 64;
  PairScales by;
  __m512 table;

  MM_INLINE_MEMBER Int4Weights(const mm_linear& linear, const char* group)
      : by(linear, group), table(_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)) {}

  MM_INLINE_MEMBER void four(const char* codes, char* out) const {
    const __m512i words = load_as<__m512i>(codes);  // the low 4 bits of each index are used
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      store_as(out + i * 64, by.rounded(_mm512_permutexvar_ps(_mm512_srli_epi32(words, i * 8), table),
                                        _mm512_permutexvar_ps(_mm512_srli_epi32(words, i * 8 + 4), table), i % 2));
  }
};

// e4m3 with a scale per 16 columns.
struct Fp8Weights {
  static constexpr int kBytes = 128;
  Fp8Codes of;

  MM_INLINE_MEMBER Fp8Weights(const mm_linear&, const char* group) : of(group) {}

  MM_INLINE_MEMBER void four(const char* codes, char* out) const {
    __m512i low[2], high[2];
    of.pairs(codes, low, high);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair)
      store_as(out + pair * 128, low[pair]), store_as(out + pair * 128 + 64, high[pair]);
  }
};

// e4m3 with a scale per column.
struct Fp8ColumnWeights {
  static constexpr int kBytes = 128;
  CodeTable of;
  Scales by;
  __m512i interleaved;

  MM_INLINE_MEMBER Fp8ColumnWeights(const mm_linear& linear, const char* group)
      : of(_mm512_set1_ps(1)), by(linear, group), interleaved(load_as<__m512i>(CodeValues::all.interleaved)) {}

  MM_INLINE_MEMBER __m512i scaled(__m512i words, int half) const {
    const f16v even = fused((f16v)_mm512_slli_epi32(words, 16), by.scales[half], by.mins[half]);
    const f16v odd =
        fused((f16v)_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)), by.scales[half], by.mins[half]);
    return _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
  }

  MM_INLINE_MEMBER void four(const char* codes, char* out) const {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, codes += 64) {
      __m512i first, second;
      of.decode(codes, first, second);
      store_as(out + half * 64, scaled(first, half));
      store_as(out + 128 + half * 64, scaled(second, half));
    }
  }
};

// Decodes a group's steps. Writes each step to `sink.room()`, then calls `sink.decoded()`.
template <class Weights, class Sink>
MM_INLINE void decode_steps(const mm_linear& linear, const char* group, Sink& sink) {
  const Weights weights(linear, group);
  const char* codes = group + codes_at(linear);
  for (const char* line = group; line < codes; line += 64) fetch_ahead<16384, 1024>(line);
  for (int step = 0; step < linear.group; step += kStep) {
    char* out = sink.room();
    for (int t = 0; t < kStep; t += 4, codes += Weights::kBytes, out += 256) {
#pragma GCC unroll 2
      for (int line = 0; line < Weights::kBytes; line += 64) fetch_ahead<16384, 1024>(codes + line);
      weights.four(codes, out);
    }
    sink.decoded();
  }
}

template <class Sink>
MM_INLINE void decode_group(const mm_linear& linear, const char* group, Sink& sink) {
  if (linear.form == MM_INT8) return decode_steps<Int8Weights>(linear, group, sink);
  if (linear.form == MM_INT4) return decode_steps<Int4Weights>(linear, group, sink);
  if (Fp8Codes::fit(group)) return decode_steps<Fp8Weights>(linear, group, sink);
  decode_steps<Fp8ColumnWeights>(linear, group, sink);
}

}  // namespace mm

#endif
