#include "linear/int8.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "linear/int8_panel.h"

namespace mm {
namespace {

MM_INLINE int32_t largest(__m256i each) {
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}

// Quantises 32 bfloat16 values to codes, which are stored XOR `flipped`. A block with a non-finite value gets the scale
// NaN.
void quantise(const uint16_t* x, char flipped, int8_t* codes, float* scale, int32_t* sum) {
  __m256 values[4];
  __m256i most = _mm256_setzero_si256(), whole[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(x + i * 8)), 16);
    most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    values[i] = (__m256)bits;
  }
  const int32_t size = largest(most);
  const float amax = _mm_cvtss_f32((__m128)_mm_cvtsi32_si128(size));
  const bool finite = size < 0x7f800000;
  const float inverse = finite && amax > 1e-30f ? 127.0f / amax : 0.0f;
  *scale = !finite ? NAN : inverse ? amax / 127.0f : 0.0f;
  for (int i = 0; i < 4; ++i)
    whole[i] = finite ? _mm256_cvtps_epi32(_mm256_mul_ps(values[i], _mm256_set1_ps(inverse))) : _mm256_setzero_si256();
  const __m256i words[2] = {_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3])};
  const __m256i bytes =
      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  store_as(codes, _mm256_xor_si256(bytes, _mm256_set1_epi8(flipped)));
  const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
  const __m128i twos = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  const __m128i pairs = _mm_add_epi32(twos, _mm_shuffle_epi32(twos, 0x4e));
  *sum = _mm_cvtsi128_si32(_mm_add_epi32(pairs, _mm_shuffle_epi32(pairs, 0xb1)));
}

void quantise_row(const LinearJob& job, const Row& row, const uint16_t* x, char* to) {
  const int64_t k = job.linear->k, in_group = job.linear->group / kBlock;
  const char flipped = kUnsigned && job.linear->form == MM_INT8 ? (char)0x80 : 0;
  for (int64_t i = 0; i < row.blocks; ++i) {
    uint16_t part[kBlock] = {};
    const int64_t left = k - i * kBlock;
    if (left > 0 && left < kBlock) memcpy(part, x + i * kBlock, left * 2);
    quantise(left < kBlock ? part : x + i * kBlock, flipped, row.codes(to) + i * kBlock, row.scales(to) + i,
             row.sums(to) + i);
  }
  for (int64_t group = 0; group < row.groups; ++group) {
    float sum = 0;
    for (int64_t i = group * in_group; i < (group + 1) * in_group; ++i)
      sum += row.scales(to)[i] * (float)row.sums(to)[i];
    row.group_sums(to)[group] = sum;
  }
}

template <bool INT4, int... I>
constexpr auto panels_of(std::integer_sequence<int, I...>) {
  return std::array{multiply_panel<INT4, I + 1>...};
}
template <bool INT4>
constexpr auto kPanels = panels_of<INT4>(std::make_integer_sequence<int, kTall>());  // index: number of rows - 1

int64_t place(const mm_linear& linear, int column, int64_t t) {
  return t / (linear.form == MM_INT4 ? 8 : 4) * 128 + column * 4 + t % 4;
}
int shift(int64_t t) { return t / 4 % 2 * 4; }

}  // namespace

int64_t int8_scratch_bytes(const LinearJob& job) { return job.m * Row(job).stride; }

void int8_prepare(const LinearJob& job, void* scratch, int row0, int row1) {
  const Row row(job);
  for (int i = row0; i < row1; ++i)
    quantise_row(job, row, (const uint16_t*)job.row(i), (char*)scratch + i * row.stride);
}

void int8_run(const LinearJob& job, const void* scratch, const Share& share) {
  const Row row(job);
  alignas(64) float c[kTall * kPanel];
  for (int panel = share.panel0; panel < share.panel1; ++panel)
    for (int first = share.row0, count; first < share.row1; first += count) {
      count = share.row1 - first < kTall ? share.row1 - first : kTall;
      const auto run = job.linear->form == MM_INT4 ? kPanels<true>[count - 1] : kPanels<false>[count - 1];
      run(*job.linear, row, (char*)scratch + first * row.stride, job.panel(panel), c);
      linear_store(job, c, kPanel, first, count, panel);
    }
}

void int8_encode(const mm_linear& linear, char* group, int column, const uint8_t* codes, int64_t count, float scale,
                 float min) {
  uint8_t* to = (uint8_t*)group + codes_at(linear);
  for (int64_t t = 0; t < count; ++t)
    if (linear.form == MM_INT4)
      to[place(linear, column, t)] |= ((codes[t] + 8) & 15) << shift(t);
    else
      to[place(linear, column, t)] = codes[t];
  store_as(group + column * 2, (uint16_t)_cvtss_sh(scale, 0));
  if (linear.mins) store_as(group + mins_at(linear) + column * 4, min);
}

float int8_decode_one(const mm_linear& linear, const char* group, int column, int64_t t) {
  const uint8_t code = (uint8_t)group[codes_at(linear) + place(linear, column, t)];
  const float value = linear.form == MM_INT4 ? (float)((code >> shift(t) & 15) - 8) : (float)(int8_t)code;
  const float scale = _cvtsh_ss(load_as<uint16_t>(group + column * 2));
  const float min = linear.mins ? load_as<float>(group + mins_at(linear) + column * 4) : 0.0f;
  return fused(splat(value), splat(scale), splat(min))[0];
}

}  // namespace mm
