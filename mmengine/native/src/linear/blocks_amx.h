// Decodes GGUF's blocks (linear/blocks.h) to scaled bfloat16 weights, in the layout of an AMX tile.
//
// Scale times number is exact in float32, so a weight is rounded to float32 once, as in ggml, and then to bfloat16.
// Results have the same bits as in a bfloat16 layer with the decoded weights.
#pragma once

#if defined(__AMX_BF16__)

#include "linear/blocks_bf16.h"
#include "linear/codes_amx.h"

namespace mm {

// Decodes the lowest code in each of 16 words to a number. 6-bit codes stay unsigned; `scales` subtracts their offset
// in a fused multiply-add, which is exact.
template <int TYPE>
struct NumberDecoder {
  static constexpr BlockForm F = block_form(TYPE);
  __m512 low, high;  // the numbers of codes 0 to 15 and 16 to 31

  MM_INLINE_MEMBER NumberDecoder() : low(widened(kNumbers<TYPE>.of)), high(widened(kNumbers<TYPE>.of + 16)) {}

  MM_INLINE_MEMBER __m512 numbers(__m512i codes) const {
    if constexpr (F.bits <= 4) return _mm512_permutexvar_ps(codes, low);
    if constexpr (F.bits == 5) return _mm512_permutex2var_ps(low, codes, high);
    if constexpr (F.bits == 6) return _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(63)));
    const __m512 size = _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(127)));  // sign and magnitude
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi32(codes, 24), _mm512_set1_epi32((int)0x80000000));
    return (__m512)_mm512_or_si512((__m512i)size, sign);
  }

  MM_INLINE_MEMBER static PairScales scales(const Heads<TYPE>& heads, const char* group) {
    Scales by = heads.scales(group);
    for (int half = 0; half < 2 && F.heads < 4; ++half)  // a type without minimums
      by.mins[half] = F.bits == 6 ? by.scales[half] * -(float)F.offset : f16v{};
    return PairScales(by);
  }

  // Decodes a pair of k for 16 columns: 8 from `left` and 8 from `right`. `half`: 0 for a panel's first 16 columns, or
  // 1.
  MM_INLINE_MEMBER void put(__m512i left, __m512i right, const PairScales& by, int half, char* out) const {
    store_as(out, by.rounded(numbers(left), numbers(right), half));
  }

 private:
  MM_INLINE_MEMBER static __m512 widened(const uint16_t* numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(numbers)), 16));
  }
};

// Decodes the whole fields of a chunk whose first pair of k is PAIR. A word's halves become separate words, in the
// order of a tile's weights.
template <int TYPE, int PAIR>
MM_INLINE void decode_fields(const NumberDecoder<TYPE>& decoder, const char* words, const PairScales* by, char* out) {
  constexpr BlockForm F = block_form(TYPE);
  for (int row = 0; row < F.words(); ++row)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const char* at = words + row * 128 + half * 64;
      const __m512i left = _mm512_cvtepu16_epi32(load_as<__m256i>(at));
      const __m512i right = _mm512_cvtepu16_epi32(load_as<__m256i>(at + 32));
      for (int field = 0; field < F.pair_fields(); ++field) {
        const int pair = PAIR + row * F.pair_fields() + field, shift = field * F.bits;
        decoder.put(_mm512_srli_epi32(left, shift), _mm512_srli_epi32(right, shift), by[pair * 2 / F.group], half,
                    out + pair * 128 + half * 64);
      }
    }
}

// Decodes a pair of k from the bits that follow the whole fields.
template <int TYPE, int PAIR>
MM_INLINE void decode_leftover(const NumberDecoder<TYPE>& decoder, const char* words, const PairScales* by, char* out) {
  constexpr int group = PAIR * 2 / block_form(TYPE).group;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m512i codes = PairDecoder<TYPE>::template leftover_codes<PAIR>(words + half * 64);
    decoder.put(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes)),
                _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1)), by[group], half,
                out + PAIR * 128 + half * 64);
  }
}

// Decodes a chunk whose first pair of k is PAIR, and all following chunks of the step.
template <int TYPE, int PAIR>
MM_INLINE void decode_chunks(const NumberDecoder<TYPE>& decoder, const char* words, const PairScales* by, char* out) {
  constexpr BlockForm F = block_form(TYPE);
  constexpr int whole = F.words() * F.pair_fields(), pairs = F.chunk() / 2;
  decode_fields<TYPE, PAIR>(decoder, words, by, out);
  if constexpr (whole < pairs) decode_leftover<TYPE, PAIR + whole>(decoder, words, by, out);
  if constexpr (whole + 1 < pairs) decode_leftover<TYPE, PAIR + whole + 1>(decoder, words, by, out);
  if constexpr (PAIR + pairs < 16) decode_chunks<TYPE, PAIR + pairs>(decoder, words + F.words() * 128, by, out);
}

// Decodes steps [step, end) of a panel. Writes each step to `sink.room()`, then calls `sink.decoded()`.
template <int TYPE, class Sink>
void decode_block_steps(const char* panel, int64_t step, int64_t end, Sink& sink) {
  static constexpr BlockForm F = block_form(TYPE);
  constexpr int steps_of_block = F.span / 32;
  const NumberDecoder<TYPE> decoder;
  panel += step / steps_of_block * F.block_bytes();
  for (int at = (int)(step % steps_of_block); step < end; panel += F.block_bytes(), at = 0) {
    const Heads<TYPE> heads(panel);
    const char* group = panel + F.heads * 32 + at * F.step_bytes();
    for (; at < steps_of_block && step < end; ++at, ++step, group += F.step_bytes()) {
      for (int line = 0; line < F.step_bytes(); line += 64) fetch_ahead<16384, 1024>(group + line);
      const char* second = group + (F.group == 16 ? F.scale_bytes * 32 : 0);
      const PairScales by[2] = {decoder.scales(heads, group), decoder.scales(heads, second)};
      decode_chunks<TYPE, 0>(decoder, group + F.step_scales(), by, sink.room());
      sink.decoded();
    }
  }
}

template <class Sink>
struct BlockSteps {
  template <int TYPE>
  struct Decode {
    static void run(const char* panel, int64_t step, int64_t end, Sink* sink) {
      decode_block_steps<TYPE>(panel, step, end, *sink);
    }
  };
};

// Decodes steps of a panel of any type.
template <class Sink>
void decode_blocks(int type, const char* panel, int64_t step, int64_t end, Sink& sink) {
  for_block_type<BlockSteps<Sink>::template Decode>(type, panel, step, end, &sink);
}

}  // namespace mm

#endif
