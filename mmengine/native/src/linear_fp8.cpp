#include "linear_fp8.h"

namespace mm {
namespace {

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
    __builtin_prefetch(codes + kFp8Ahead, 0, 2);
    __builtin_prefetch(codes + kFp8Ahead + 64, 0, 2);
    for (int place = 0; place < 8; ++place) {
      h16v bits = narrow(halves_of(codes + place * 16) * load_as<f16v>(scales[place]));
      memcpy(out + place * 16, &bits, 16);
      memcpy(out + 128 + place * 16, (const char*)&bits + 16, 16);
    }
  }
}

}  // namespace

#if defined(__AVX512VBMI__)
Fp8Values::Fp8Values() {
  for (int code = 0; code < 128; ++code) {
    char codes[16] = {(char)code};
    of[code] = halves_of(codes)[0] * kTooSmall;
  }
  for (int i = 0; i < 64; ++i) even[i] = (uint8_t)(2 * i), odd[i] = (uint8_t)(2 * i + 1);
}

const Fp8Values Fp8Values::all;
#endif

void fp8_decode(const char* group, int size, char* out) {
#if defined(__AVX512VBMI__)
  if (Fp8Tables::fit(group)) {
    const Fp8Tables tables(group);
    const char* codes = group + kScaleBytes;
    for (int t = 0; t < size; t += 4, codes += 128, out += 256)
      for (int half = 0; half < 2; ++half) {
        __m512i first, second;
        tables.of[half].decode(codes + half * 64, first, second);
        store_as(out + half * 64, first);
        store_as(out + half * 64 + 128, second);
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
