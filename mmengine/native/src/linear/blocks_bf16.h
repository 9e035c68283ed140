// Decodes a step of a bfloat16 layer's blocks (linear/blocks.h) in registers: pairs of unscaled numbers for 16 columns,
// and the scales of the step's groups.
#pragma once

#include <utility>

#include "linear/blocks.h"
#include "linear/codes.h"

namespace mm {

// Returns the bits of a small integer in bfloat16.
constexpr uint16_t bfloat16_of(int number) {
  const uint32_t size = (uint32_t)(number < 0 ? -number : number);
  if (!size) return 0;
  int exponent = 0;
  while (size >> (exponent + 1)) ++exponent;
  return (uint16_t)((number < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | ((size << 7 >> exponent) & 0x7f));
}

// A lookup table from code to bfloat16 number. The table repeats, because an index may have extra bits above the code.
template <int TYPE>
struct NumberTable {
  static constexpr BlockForm F = block_form(TYPE);
  alignas(64) uint16_t of[64];

  constexpr NumberTable() : of{} {
    for (int i = 0; i < 64; ++i) {
      const int code = i & ((1 << F.bits) - 1);
      of[i] = bfloat16_of(!F.table ? code - F.offset : (TYPE == kMXFP4 ? kMXFP4Values : kIQ4Values)[code]);
    }
  }
};
template <int TYPE>
constexpr NumberTable<TYPE> kNumbers;

template <int TYPE>
struct PairDecoder {
  static constexpr BlockForm F = block_form(TYPE);
  static constexpr int kPairs = F.chunk() / 2, kWhole = F.words() * F.pair_fields();
  __m512i values[2], above[2];  // lookup tables; for Q8_0, the low and the high bytes

  MM_INLINE_MEMBER PairDecoder() {
    for (int i = 0; i < 2; ++i)
      if constexpr (F.bits == 8) {
        values[i] = load_as<__m512i>(CodeValues::all.int8_low + i * 64);
        above[i] = load_as<__m512i>(CodeValues::all.int8_high + i * 64);
      } else {
        values[i] = load_as<__m512i>(kNumbers<TYPE>.of + i * 32);
      }
  }

  // Decodes pair P of a step whose first words are at `words`.
  template <int P>
  MM_INLINE_MEMBER __m512i pair(const char* words) const {
    constexpr int in_chunk = P % kPairs;
    words += P / kPairs * F.words() * 128;
    if constexpr (in_chunk >= kWhole) {
      return looked_up(leftover_codes<in_chunk>(words));
    } else {
      constexpr int place = in_chunk % F.pair_fields();
      const __m512i word = load_as<__m512i>(words + in_chunk / F.pair_fields() * 128);
      if constexpr (F.bits == 8) return from_bytes<place>(word);
      return looked_up(place ? _mm512_srli_epi16(word, place * F.bits) : word);
    }
  }

  // Returns the codes of pair P, whose bits follow the whole fields of a chunk. `words`: the chunk's words.
  template <int P>
  MM_INLINE_MEMBER static __m512i leftover_codes(const char* words) {
    return leftover<P % kPairs - kWhole>(words, std::make_integer_sequence<int, F.words()>());
  }

 private:
  MM_INLINE_MEMBER __m512i looked_up(__m512i codes) const {
    if constexpr (F.bits > 5) return _mm512_permutex2var_epi16(values[0], codes, values[1]);
    return _mm512_permutexvar_epi16(codes, values[0]);
  }

  // Looks up signed magnitudes: the low bytes of the words' halves if PLACE is 0, else the high bytes.
  template <int PLACE>
  MM_INLINE_MEMBER __m512i from_bytes(__m512i codes) const {
    const __m512i low = _mm512_permutex2var_epi8(values[0], codes, values[1]);
    __m512i high = _mm512_permutex2var_epi8(above[0], codes, above[1]);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8);  // high | (codes & 0x80)
    const __mmask64 odd = 0xaaaaaaaaaaaaaaaa;
    return PLACE ? _mm512_mask_blend_epi8(odd, _mm512_srli_epi16(low, 8), high)
                 : _mm512_mask_blend_epi8(odd, low, _mm512_slli_epi16(high, 8));
  }

  // Combines the bits that follow the whole fields in each word's halves.
  template <int ODD, int... WORD>
  MM_INLINE_MEMBER static __m512i leftover(const char* words, std::integer_sequence<int, WORD...>) {
    constexpr int count = F.bits / F.words(), first = F.pair_fields() * F.bits + ODD * count;
    __m512i found = _mm512_setzero_si512();
    ((found = _mm512_or_si512(
          found, _mm512_and_si512(_mm512_srli_epi16(load_as<__m512i>(words + WORD * 128), first - WORD * count),
                                  _mm512_set1_epi16((int16_t)(((1 << count) - 1) << WORD * count))))),
     ...);
    return found;
  }
};

// The floating-point factors of a block.
template <int TYPE>
struct Heads {
  static constexpr BlockForm F = block_form(TYPE);
  f16v d[2], companion[2];

  MM_INLINE_MEMBER explicit Heads(const char* block) {
    for (int half = 0; half < 2; ++half) {
      if constexpr (TYPE == kMXFP4)
        d[half] = powers(block + half * 16);
      else
        d[half] = from_halves(load_as<__m256i>(block + half * 32));
      if constexpr (F.heads == 4) companion[half] = from_halves(load_as<__m256i>(block + 64 + half * 32));
    }
  }

  // Returns a group's scales, and the minimums if the type has them. `group`: the integer scales and minimums.
  MM_INLINE_MEMBER Scales scales(const char* group) const {
    Scales by;
    for (int half = 0; half < 2; ++half) {
      if constexpr (TYPE == kQ2_K) {
        const __m512i both = _mm512_cvtepu8_epi32(load_as<__m128i>(group + half * 16));
        by.scales[half] = d[half] * floats(_mm512_and_si512(both, _mm512_set1_epi32(15)));
        by.mins[half] = -companion[half] * floats(_mm512_srli_epi32(both, 4));
      } else if constexpr (F.scale_bytes == 2) {
        by.scales[half] = d[half] * floats(_mm512_cvtepu8_epi32(load_as<__m128i>(group + half * 16)));
        by.mins[half] = -companion[half] * floats(_mm512_cvtepu8_epi32(load_as<__m128i>(group + 32 + half * 16)));
      } else {
        by.scales[half] = d[half];
        if constexpr (F.scale_bytes) by.scales[half] *= floats(_mm512_cvtepi8_epi32(load_as<__m128i>(group + half * 16)));
        if constexpr (F.heads == 4) by.mins[half] = companion[half];
      }
    }
    return by;
  }

 private:
  MM_INLINE_MEMBER static f16v floats(__m512i whole) { return (f16v)_mm512_cvtepi32_ps(whole); }

  MM_INLINE_MEMBER static f16v powers(const char* at) {
    const __m512i e = _mm512_cvtepu8_epi32(load_as<__m128i>(at));
    const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x200000), e);
    const __m512i large = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    return (f16v)_mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)), large, small);
  }
};

}  // namespace mm
