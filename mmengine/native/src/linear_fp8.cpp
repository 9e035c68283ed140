#include "linear_fp8.h"

#include <immintrin.h>

#include "linear_vec.h"

namespace mm {
namespace {

constexpr int kAhead = 512;          // bytes
constexpr float kTooSmall = 256.0f;  // float16's exponent is biased by 15, e4m3's by 7

// 16 codes by the bits of float16, which has their subnormals, too: all is kTooSmall times too small.
MM_INLINE f16v halves_of(const char* codes) {
  __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_as<__m128i>(codes)), 7);
  __m256i bits = _mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbf80));
#if defined(__AVX512F__)
  return (f16v)_mm512_cvtph_ps(bits);
#else
  struct {
    __m256 low, high;
  } both = {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  return load_as<f16v>(&both);
#endif
}

void decode_by_columns(const char* group, int size, char* out) {
  float scales[8][16];  // of the codes in each 16 bytes of two pairs
  for (int place = 0; place < 8; ++place)
    for (int i = 0; i < 16; ++i)
      scales[place][i] = kTooSmall * load_as<float>(group + 4 * (place * 4 + i % 8 / 2));
  const char* codes = group + kScaleBytes;
  for (int t = 0; t < size; t += 4, codes += 128, out += 256) {
    __builtin_prefetch(codes + kAhead, 0, 2);
    __builtin_prefetch(codes + kAhead + 64, 0, 2);
    for (int place = 0; place < 8; ++place) {
      h16v bits = narrow(halves_of(codes + place * 16) * load_as<f16v>(scales[place]));
      memcpy(out + place * 16, &bits, 16);
      memcpy(out + 128 + place * 16, (const char*)&bits + 16, 16);
    }
  }
}

#if defined(__AVX512VBMI__)
struct Values {
  alignas(64) float of[128];
  Values() {
    for (int code = 0; code < 128; ++code) {
      char codes[16] = {(char)code};
      of[code] = halves_of(codes)[0] * kTooSmall;
    }
  }
};
const Values kValues;

// Of the 128 codes without a sign, as bfloat16: high and low bytes.
struct Table {
  __m512i high[2], low[2];

  explicit Table(__m512 scale) {
    __m512i even, odd;
    alignas(64) uint8_t places[64];
    for (int i = 0; i < 64; ++i) places[i] = (uint8_t)(2 * i);
    even = load_as<__m512i>(places);
    odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    for (int i = 0; i < 2; ++i) {
      const float* from = kValues.of + i * 64;
      __m512 v[4];
      for (int j = 0; j < 4; ++j) v[j] = _mm512_mul_ps(load_as<__m512>(from + 16 * j), scale);
      __m512i first = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]), second = (__m512i)_mm512_cvtne2ps_pbh(v[3], v[2]);
      low[i] = _mm512_permutex2var_epi8(first, even, second);
      high[i] = _mm512_permutex2var_epi8(first, odd, second);
    }
  }

  // A half of two pairs of k.
  inline __attribute__((always_inline)) void decode(const char* codes, char* out) const {
    __m512i code = load_as<__m512i>(codes);
    __m512i below = _mm512_permutex2var_epi8(low[0], code, low[1]);
    __m512i above = _mm512_permutex2var_epi8(high[0], code, high[1]);
    above = _mm512_ternarylogic_epi32(above, code, _mm512_set1_epi8((char)0x80), 0xf8);  // or the sign
    store_as(out, _mm512_unpacklo_epi8(below, above));
    store_as(out + 128, _mm512_unpackhi_epi8(below, above));
  }
};

bool is_one(__m512 scales, __m512 first) { return _mm512_cmpeq_ps_mask(scales, first) == 0xffff; }
#endif

}  // namespace

void fp8_decode(const char* group, int size, char* out) {
#if defined(__AVX512VBMI__)
  __m512 left = _mm512_set1_ps(load_as<float>(group)), right = _mm512_set1_ps(load_as<float>(group + 64));
  if (is_one(load_as<__m512>(group), left) && is_one(load_as<__m512>(group + 64), right)) {
    const Table tables[2] = {Table(left), Table(right)};
    const char* codes = group + kScaleBytes;
    for (int t = 0; t < size; t += 4, codes += 128, out += 256) {
      __builtin_prefetch(codes + kAhead, 0, 2);
      __builtin_prefetch(codes + kAhead + 64, 0, 2);
      tables[0].decode(codes, out);
      tables[1].decode(codes + 64, out + 64);
    }
    return;
  }
#endif
  decode_by_columns(group, size, out);
}

uint16_t fp8_decode_one(const char* group, int column, int64_t t) {
  char code[16] = {group[kScaleBytes + place_fp8(column, t)]};
  return narrow(halves_of(code) * (kTooSmall * load_as<float>(group + column * 4)))[0];
}

const char* LinearJob::weights(int p, char* decoded) const {
  if (!linear->group) return panel(p);
  const char* from = panel(p);
  char* to = decoded;
  for (int64_t first = 0; first < linear->k; first += linear->group) {
    fp8_decode(from, linear->group, to);
    from += group_bytes(*linear);
    to += (int64_t)linear->group * 64;
  }
  return decoded;
}

}  // namespace mm
