// Decodes a step of a block (linear/blocks.h) in registers: 32 values of k for 32 columns, in k's order.
//
// A code is masked in its word and converted without a shift, which gives the code times a power of two. The scale is
// multiplied by the inverse power, so the product is exact. Only the code in a word's highest bits is shifted, because
// the conversion is signed. The offset is applied together with the minimum: scale * code - offset * scale.
#pragma once

#include <immintrin.h>

#include <utility>

#include "common/fetch.h"
#include "linear/blocks.h"

namespace mm {

constexpr int kEights = 4;  // vectors of 8 columns in a panel

MM_INLINE __m256i word_at(const char* words, int row, int eight) {
  return load_as<__m256i>(words + row * 128 + eight * 32);
}

// Reads a group's scales and addends for eight columns. A weight is scale * code + addend.
template <int TYPE>
struct GroupScales {
  static constexpr BlockForm F = block_form(TYPE);

  MM_INLINE_MEMBER static __m256 bytes(const char* at, bool is_signed) {
    const __m128i eight = _mm_loadl_epi64((const __m128i*)at);
    return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight));
  }
  MM_INLINE_MEMBER static __m256 halves(const char* at) { return _mm256_cvtph_ps(load_as<__m128i>(at)); }

  // Flips the sign. Zero becomes -0, unlike in 0 - value. Adding -0 keeps the sign of a zero product.
  MM_INLINE_MEMBER static __m256 flipped(__m256 value) { return _mm256_xor_ps(value, _mm256_set1_ps(-0.0f)); }

  MM_INLINE_MEMBER static __m256 powers(const char* at) {
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at));
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), e);
    const __m256i large = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    return (__m256)_mm256_blendv_epi8(large, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e));
  }

  MM_INLINE_MEMBER static void read(const char* block, const char* group, int eight, __m256& scale, __m256& addend) {
    if constexpr (TYPE == kMXFP4) {
      scale = powers(block + eight * 8), addend = _mm256_setzero_ps();
      return;
    } else {
      const __m256 d = halves(block + eight * 16);
      if constexpr (TYPE == kQ2_K) {
        const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(group + eight * 8)));
        const __m256i low = _mm256_and_si256(both, _mm256_set1_epi32(15)), high = _mm256_srli_epi32(both, 4);
        scale = _mm256_mul_ps(d, _mm256_cvtepi32_ps(low));
        addend = flipped(_mm256_mul_ps(halves(block + 64 + eight * 16), _mm256_cvtepi32_ps(high)));
      } else if constexpr (F.scale_bytes == 2) {
        scale = _mm256_mul_ps(d, bytes(group + eight * 8, false));
        addend = flipped(_mm256_mul_ps(halves(block + 64 + eight * 16), bytes(group + 32 + eight * 8, false)));
      } else {
        scale = F.scale_bytes ? _mm256_mul_ps(d, bytes(group + eight * 8, true)) : d;
        addend = F.heads == 4 ? halves(block + 64 + eight * 16) : _mm256_mul_ps(scale, _mm256_set1_ps(-F.offset));
      }
    }
  }
};

constexpr float inverse_power(int bits) { return bits ? inverse_power(bits - 1) / 2 : 1; }

// Calls emit.put(emit.at<k>(), k, eight, weights) for each k of a step and for each eight columns. `block`: the address
// of the block's d.
template <int TYPE>
struct StepDecoder {
  static constexpr BlockForm F = block_form(TYPE);
  static constexpr int kWhole = F.words() * F.fields();

  __m256 scale[kEights], addend[kEights], inverse[kEights];
  const char *block, *step, *words;

  MM_INLINE_MEMBER StepDecoder(const char* block, const char* step)
      : block(block), step(step), words(step + F.step_scales()) {}

  template <class Emit>
  MM_INLINE_MEMBER void run(const Emit& emit) {
    run_each(emit, std::make_integer_sequence<int, 32>());
  }

 private:
  template <class Emit, int... K>
  MM_INLINE_MEMBER void run_each(const Emit& emit, std::integer_sequence<int, K...>) {
    (one<K>(emit), ...);
  }

  template <int K, class Emit>
  MM_INLINE_MEMBER void one(const Emit& emit) {
    constexpr int t = K % F.chunk(), bits = F.table ? t % 4 * 8 : t < kWhole ? t / F.words() * F.bits : 0;
    constexpr bool is_new = K % F.group == 0;
    if constexpr (is_new)
      for (int eight = 0; eight < kEights; ++eight)
        GroupScales<TYPE>::read(block, step + K / F.group * F.scale_bytes * 32, eight, scale[eight], addend[eight]);
    constexpr int width = F.table ? 8 : F.bits;
    constexpr bool at_end = bits + width == 32, shifts = at_end || TYPE == kMXFP4;
    constexpr bool scales = !shifts && bits && (F.table || is_new || t % F.words() == 0);
    if constexpr (scales)
      for (int eight = 0; eight < kEights; ++eight)
        inverse[eight] = _mm256_mul_ps(scale[eight], _mm256_set1_ps(inverse_power(bits)));
    const auto x = emit.template at<K>();
    for (int eight = 0; eight < kEights; ++eight) {
      const __m256 value = _mm256_cvtepi32_ps(code<K>(eight));
      const __m256 by = bits && !shifts ? inverse[eight] : scale[eight];
      emit.put(x, K, eight, F.heads == 4 || F.offset ? _mm256_fmadd_ps(value, by, addend[eight]) : value * by);
    }
  }

  // Returns the codes for value K. Codes that are not shifted are multiplied by a power of two.
  template <int K>
  MM_INLINE_MEMBER __m256i code(int eight) const {
    constexpr int t = K % F.chunk(), row = K / F.chunk() * F.words();
    if constexpr (F.table) {
      return looked_up<K>(eight);
    } else if constexpr (t >= kWhole) {
      return leftover<t - kWhole>(row, eight);
    } else {
      constexpr int bits = t / F.words() * F.bits;
      const __m256i word = word_at(words, row + t % F.words(), eight);
      if constexpr (bits + F.bits == 32) return _mm256_srli_epi32(word, bits);
      return _mm256_and_si256(word, _mm256_set1_epi32((int)(((1u << F.bits) - 1) << bits)));
    }
  }

  template <int K>
  MM_INLINE_MEMBER __m256i looked_up(int eight) const {
    constexpr int t = K % 4;
    const __m256i word = word_at(words, K / 8, eight);
    const __m256i codes = _mm256_and_si256(K / 4 % 2 ? _mm256_srli_epi32(word, 4) : word, _mm256_set1_epi8(15));
    if constexpr (TYPE == kMXFP4) {
      const __m256i values = _mm256_broadcastsi128_si256(load_as<__m128i>(kMXFP4Values));
      return _mm256_srai_epi32(_mm256_slli_epi32(_mm256_shuffle_epi8(values, codes), 24 - 8 * t), 24);
    }
    const __m256i values = _mm256_broadcastsi128_si256(load_as<__m128i>(kIQ4Values));
    const __m256i above = _mm256_xor_si256(_mm256_shuffle_epi8(values, codes), _mm256_set1_epi8((char)0x80));
    if constexpr (t == 3) return _mm256_srli_epi32(above, 24);
    return _mm256_and_si256(above, _mm256_set1_epi32((int)(0xffu << 8 * t)));
  }

  template <int ODD>
  MM_INLINE_MEMBER __m256i leftover(int row, int eight) const {
    const auto bits_of = [&](int word, int shift, int mask) {
      const __m256i all = _mm256_srli_epi32(word_at(words, row + word, eight), shift);
      return mask == 3 ? all : _mm256_and_si256(all, _mm256_set1_epi32(mask));
    };
    if constexpr (F.bits == 3) return _mm256_or_si256(bits_of(ODD, 30, 3), bits_of(2, 28 + ODD, 4));
    if constexpr (F.bits == 5)
      return _mm256_or_si256(_mm256_or_si256(bits_of(2 * ODD, 30, 3), bits_of(2 * ODD + 1, 28, 12)),
                             bits_of(4, 26 + ODD, 16));
    return _mm256_or_si256(_mm256_or_si256(bits_of(0, 30, 3), bits_of(1, 28, 12)), bits_of(2, 26, 48));
  }
};

}  // namespace mm
