// Encodes and decodes codes of a panel for AVX-512.
#include "linear/codes.h"

#if defined(__AVX512F__)

namespace mm {
namespace {

#if defined(__AVX512VBMI__)
constexpr float kTooSmall = 256.0f;  // 2^(15 - 7): float16's exponent bias is 15, e4m3's is 7

// Returns the values of 16 e4m3 codes. The codes are converted as float16 bits, which also represent e4m3's subnormals.
MM_INLINE f16v fp8_values(const char* codes) {
  __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_as<__m128i>(codes)), 7);
  return from_halves(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)0xbf80))) * kTooSmall;
}

// Returns the offset of a one-byte code in the layout for table lookups (linear/codes.h).
int64_t place_looked_up(int column, int64_t t) {
  return t / 4 * 128 + column / 16 * 64 + column % 16 / 4 * 16 + t / 2 % 2 * 8 + column % 4 * 2 + t % 2;
}

#if defined(__AMX_BF16__)
int64_t place_byte(const mm_linear& linear, int column, int64_t t) {
  return linear.form == MM_INT8 ? t / 2 * 64 + column * 2 + t % 2 : place_looked_up(column, t);
}

// Return the offset of an int4 code's byte, and the code's shift within the byte.
int64_t place_half(int column, int64_t t) {
  return t / 4 * 64 + (column % 8 * 2 + t % 2) * 4 + t / 2 % 2 * 2 + column / 16;
}
int shift_of(int column, int64_t) { return column / 8 % 2 * 4; }

uint8_t stored(const mm_linear&, uint8_t code) { return code; }
int number(uint8_t code) { return (int8_t)code; }
#else
void decode_fp8(const char* codes, int size, char* out) {
  for (int t = 0; t < size; t += 4, codes += 128, out += 256)
    for (int place = 0; place < 8; ++place) {
      h16v bits = narrow(fp8_values(codes + place * 16));
      memcpy(out + place * 16, &bits, 16);
      memcpy(out + 128 + place * 16, (const char*)&bits + 16, 16);
    }
}

int64_t place_byte(const mm_linear&, int column, int64_t t) { return place_looked_up(column, t); }

// Return the offset of an int4 code's byte, and the code's shift within the byte.
int64_t place_half(int column, int64_t t) { return t / 4 * 128 + column % 16 * 4 + t % 2 * 2 + t / 2 % 2; }
int shift_of(int column, int64_t) { return column / 16 * 4; }

uint8_t stored(const mm_linear& linear, uint8_t code) {
  return linear.form == MM_INT8 && code & 128 ? (256 - code) | 128 : code;
}
int number(uint8_t code) { return code & 128 ? -(code & 127) : code; }
#endif
#else
// Decodes a group to steps of bfloat16. `by`: the scales to apply, or NULL to leave the codes unscaled.
template <class Codes>
void decode_pairs(const mm_linear& linear, const char* group, char* out, const Scales* by = nullptr) {
  const char* codes = group + codes_at(linear);
  for (int t = 0; t < linear.group; t += 2, codes += Codes::kBytes, out += 128)
    for (int column = 0; column < kPanel; column += kColumns) {
      typedef uint32_t bits_of __attribute__((vector_size(sizeof(columns))));
      columns first, second;
      Codes::two(codes + column, first, second);
      if (by) {
        columns scale = load_as<columns>((const float*)by->scales + column);
        first = scaled(first, scale), second = scaled(second, scale);
      }
      store_as(out + column * 4, (bits_of)first >> 16 | ((bits_of)second & 0xffff0000u));
    }
}

int64_t place_byte(const mm_linear&, int column, int64_t t) { return t * 32 + column; }
int64_t place_half(int column, int64_t t) { return t / 2 * 32 + column; }
int shift_of(int, int64_t t) { return t % 2 * 4; }
uint8_t stored(const mm_linear&, uint8_t code) { return code; }
int number(uint8_t code) { return (int8_t)code; }
MM_INLINE columns fp8_values(const char* codes) { return Fp8Codes::one(codes); }
#endif

#if !defined(__AMX_BF16__)
// Scales a group's decoded codes in place.
void scale_steps(const Scales& by, int size, char* out) {
  for (int t = 0; t < size; t += 2, out += 128)
    for (int half = 0; half < 2; ++half) {
      u16v words = load_as<u16v>(out + half * 64);
      h16v even = narrow(fused((f16v)(words << 16), by.scales[half], by.mins[half]));
      h16v odd = narrow(fused((f16v)(words & 0xffff0000u), by.scales[half], by.mins[half]));
      store_as(out + half * 64, __builtin_convertvector(even, u16v) | __builtin_convertvector(odd, u16v) << 16);
    }
}
#endif

}  // namespace

#if defined(__AVX512VBMI__)
CodeValues::CodeValues() {
  for (int code = 0; code < 128; ++code) {
    char codes[16] = {(char)code};
    fp8[code] = fp8_values(codes)[0];
    uint16_t bits = narrow(splat((float)code))[0];
    int8_low[code] = (uint8_t)bits, int8_high[code] = (uint8_t)(bits >> 8);
  }
  for (int i = 0; i < 32; ++i) int4[i] = narrow(splat((float)(i % 16 - 8)))[0];
  for (int i = 0; i < 32; ++i) interleaved[i] = (uint16_t)(i / 2 + i % 2 * 16);
  for (int i = 0; i < 64; ++i) even[i] = (uint8_t)(2 * i), odd[i] = (uint8_t)(2 * i + 1);
}

const CodeValues CodeValues::all;
#endif

#if defined(__AMX_BF16__)
// These functions are in linear/codes_amx.h.
#elif defined(__AVX512VBMI__)
void decode_weights(const mm_linear& linear, const char* group, char* out) {
  if (linear.form == MM_FP8 && Fp8Codes::fit(group)) return decode_pairs<Fp8Codes>(linear, group, out);
  decode_codes(linear, group, out);
  scale_steps(Scales(linear, group), linear.group, out);
}

void decode_codes(const mm_linear& linear, const char* group, char* out) {
  if (linear.form == MM_INT8) return decode_pairs<Int8Codes>(linear, group, out);
  if (linear.form == MM_INT4) return decode_pairs<Int4Codes>(linear, group, out);
  decode_fp8(group + codes_at(linear), linear.group, out);
}
#else
void decode_weights(const mm_linear& linear, const char* group, char* out) {
  const Scales by(linear, group);
  if (linear.form == MM_FP8) return decode_pairs<Fp8Codes>(linear, group, out, &by);
  decode_codes(linear, group, out);
  scale_steps(by, linear.group, out);
}

void decode_codes(const mm_linear& linear, const char* group, char* out) {
  if (linear.form == MM_FP8) return decode_pairs<Fp8Codes>(linear, group, out);
  if (linear.form == MM_INT8) return decode_pairs<Int8Codes>(linear, group, out);
  decode_pairs<Int4Codes>(linear, group, out);
}
#endif

float decode_one(const mm_linear& linear, const char* group, int column, int64_t t) {
  const uint8_t* codes = (const uint8_t*)group + placed(linear, codes_at(linear));
  const Scales by(linear, group);
  float value;
  if (linear.form == MM_INT4) {
    value = (float)((codes[place_half(column, t)] >> shift_of(column, t) & 15) - 8);
  } else if (linear.form == MM_INT8) {
    value = (float)number(codes[place_byte(linear, column, t)]);
  } else {
    char code[16] = {(char)codes[place_byte(linear, column, t)]};
    value = fp8_values(code)[0];
  }
  return fused(splat(value), by.scales[column / 16], by.mins[column / 16])[column % 16];
}

void encode_column(const mm_linear& linear, char* group, int column, const uint8_t* codes, int64_t count, float scale,
                   float min) {
  uint8_t* to = (uint8_t*)group + placed(linear, codes_at(linear));
  if (linear.form == MM_INT4)
    for (int64_t t = 0; t < count; ++t) to[place_half(column, t)] |= ((codes[t] + 8) & 15) << shift_of(column, t);
  else
    for (int64_t t = 0; t < count; ++t) to[place_byte(linear, column, t)] = stored(linear, codes[t]);
  if (linear.form == MM_FP8)
    store_as(group + column * 4, scale);
  else
    store_as(group + column * 2, (uint16_t)_cvtss_sh(scale, 0));
  if (linear.mins) store_as(group + placed(linear, mins_at(linear) + column * 4), min);
}

}  // namespace mm

#endif
