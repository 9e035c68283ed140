#include "linear/int8.h"

#include <array>
#include <cstring>
#include <utility>

#include "linear/int8_panel.h"

namespace mm {
namespace {

// Quantises 32 bfloat16 values to int8 codes, which are stored XOR `flipped`.
void quantise(const uint16_t* x, char flipped, int8_t* codes, float* scale, int32_t* sum) {
  __m256i whole[4];
  *scale = quantise_block(x, 127.0f, whole);
  const __m256i bytes = bytes_of(whole);
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

// Quantises a row to 16-bit codes.
void quantise_row_to_words(const LinearJob& job, const Row& row, const uint16_t* x, char* to) {
  const __m256i flipped = _mm256_set1_epi8(kUnsigned ? (char)0x80 : 0);
  for (int64_t i = 0, left = job.linear->k; i < row.blocks; ++i, left -= kBlock) {
    uint16_t part[kBlock] = {};
    if (left < kBlock) memcpy(part, x + i * kBlock, left * 2);
    __m256i codes[4], high, low;
    row.scales(to)[i] = quantise_block(left < kBlock ? part : x + i * kBlock, kMostWord, codes);
    split_words(codes, high, low);
    store_as(row.codes(to) + i * kBlock, _mm256_xor_si256(high, flipped));
    store_as(row.codes(to + row.stride) + i * kBlock, _mm256_xor_si256(low, flipped));
  }
}

template <bool INT4, int WIDTH, int... I>
constexpr auto panels_of(std::integer_sequence<int, I...>) {
  return std::array{multiply_panel<INT4, WIDTH, I + 1>...};
}
template <bool INT4, int WIDTH = 1>
constexpr auto kPanels = panels_of<INT4, WIDTH>(std::make_integer_sequence<int, kTall>());  // index: number of rows - 1

auto panel_of(const mm_linear& linear, int rows) {
#if defined(__AVX512VNNI__)
  if (linear.x_form == MM_INT16) return kPanels<false, 2>[rows - 1];
#endif
  return linear.form == MM_INT4 ? kPanels<true>[rows - 1] : kPanels<false>[rows - 1];
}

int64_t place(const mm_linear& linear, int column, int64_t t) {
  return t / (linear.form == MM_INT4 ? 8 : 4) * 128 + column * 4 + t % 4;
}
int shift(int64_t t) { return t / 4 % 2 * 4; }

}  // namespace

int64_t int8_scratch_bytes(const LinearJob& job) {
  const Row row(job);
  return job.m * row.width * row.stride;
}

void int8_prepare(const LinearJob& job, void* scratch, int row0, int row1) {
  const Row row(job);
  for (int i = row0; i < row1; ++i) {
    char* to = (char*)scratch + i * row.width * row.stride;
    if (job.linear->x_form == MM_INT16)
      quantise_row_to_words(job, row, (const uint16_t*)job.row(i), to);
    else
      quantise_row(job, row, (const uint16_t*)job.row(i), to);
  }
}

void int8_run(const LinearJob& job, const void* scratch, const Share& share) {
  const Row row(job);
  alignas(64) float c[kTall * kPanel];
  for (int panel = share.panel0; panel < share.panel1; ++panel)
    for (int first = share.row0, count; first < share.row1; first += count) {
      count = share.row1 - first < kTall ? share.row1 - first : kTall;
      char* rows = (char*)scratch + first * row.width * row.stride;
      panel_of(*job.linear, count)(*job.linear, row, rows, job.panel(panel), c);
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
