// Packs GGUF's blocks into panels, and unpacks columns.
#include "linear/blocks.h"

#include <cstring>

#include "common/vec.h"
#include "linear/job.h"

namespace mm {
namespace {

constexpr int kMostValues = 256, kMostParts = 5;

// A GGUF block with a byte for each code, scale and minimum. `d`, `companion`: the file's bits (linear/blocks.h).
struct Unpacked {
  uint8_t codes[kMostValues], scales[16], mins[16];
  uint16_t d, companion;
};

void halves(const uint8_t* low, int count, uint8_t* codes) {
  for (int i = 0; i < count; ++i) codes[i] = low[i] & 15, codes[i + count] = low[i] >> 4;
}

void fifth_bits(const uint8_t* high, uint8_t* codes) {
  const uint32_t bits = load_as<uint32_t>(high);
  for (int i = 0; i < 32; ++i) codes[i] |= (bits >> i & 1) << 4;
}

void two_bits(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) codes[i] = packed[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

void six_bit_scales(const uint8_t* s, Unpacked& out) {
  for (int j = 0; j < 8; ++j) {
    out.scales[j] = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
    out.mins[j] = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
  }
}

void unpack_q2_k(const uint8_t* block, Unpacked& out) {
  memcpy(out.scales, block, 16);
  two_bits(block + 16, out.codes);
  memcpy(&out.d, block + 80, 4);
}

void unpack_q3_k(const uint8_t* block, Unpacked& out) {
  two_bits(block + 32, out.codes);
  for (int i = 0; i < 256; ++i) out.codes[i] |= (block[i % 32] >> (i / 32) & 1) << 2;
  const uint8_t* s = block + 96;
  for (int k = 0; k < 16; ++k) {
    const int low = s[k % 8] >> (k / 8 * 4) & 15;
    out.scales[k] = (uint8_t)((low | (s[8 + k % 4] >> (k / 4 * 2) & 3) << 4) - 32);
  }
  memcpy(&out.d, block + 108, 2);
}

void unpack_q45_k(const uint8_t* block, int bits, Unpacked& out) {
  memcpy(&out.d, block, 4);
  six_bit_scales(block + 4, out);
  const uint8_t* low = block + (bits == 5 ? 48 : 16);
  for (int pair = 0; pair < 4; ++pair) halves(low + pair * 32, 32, out.codes + pair * 64);
  for (int i = 0; bits == 5 && i < 256; ++i) out.codes[i] |= (block[16 + i % 32] >> (i / 32) & 1) << 4;
}

void unpack_q6_k(const uint8_t* block, Unpacked& out) {
  for (int half = 0; half < 2; ++half) {
    uint8_t* codes = out.codes + half * 128;
    halves(block + half * 64, 64, codes);
    for (int i = 0; i < 128; ++i) codes[i] |= (block[128 + half * 32 + i % 32] >> (i / 32 * 2) & 3) << 4;
  }
  memcpy(out.scales, block + 192, 16);
  memcpy(&out.d, block + 208, 2);
}

void unpack_iq4_xs(const uint8_t* block, Unpacked& out) {
  memcpy(&out.d, block, 2);
  const int high = load_as<uint16_t>(block + 2);
  for (int j = 0; j < 8; ++j) {
    const int low = block[4 + j / 2] >> (j % 2 * 4) & 15;
    out.scales[j] = (uint8_t)((low | (high >> 2 * j & 3) << 4) - 32);
    halves(block + 8 + j * 16, 16, out.codes + j * 32);
  }
}

// Unpacks a block of 32 values, stored as d, companion, high bits, low bits.
void unpack_32(const BlockForm& form, const uint8_t* block, Unpacked& out) {
  memcpy(&out.d, block, form.heads);
  block += form.heads;
  if (form.bits == 8) {
    for (int i = 0; i < 32; ++i) out.codes[i] = block[i] ^ 0x80;
    return;
  }
  halves(block + (form.bits == 5 ? 4 : 0), 16, out.codes);
  if (form.bits == 5) fifth_bits(block, out.codes);
}

void unpack(const BlockForm& form, const uint8_t* block, Unpacked& out) {
  out.d = out.companion = 0;
  if (form.span == 32) return unpack_32(form, block, out);
  if (form.type == kQ2_K) return unpack_q2_k(block, out);
  if (form.type == kQ3_K) return unpack_q3_k(block, out);
  if (form.type == kQ6_K) return unpack_q6_k(block, out);
  if (form.type == kIQ4_XS) return unpack_iq4_xs(block, out);
  unpack_q45_k(block, form.bits, out);
}

// Where a code's bits are in the words of a chunk (the fewest codes that fill whole words), from the low bits up.
struct Places {
  int words[kMostParts], shifts[kMostParts], counts[kMostParts];
};

// Returns the places of code t of a chunk in a bfloat16 layer.
Places paired_places(const BlockForm& form, int t) {
  const int pair = t / 2, half = t % 2 * 16, fields = form.pair_fields(), whole = form.words() * fields;
  if (pair < whole) return {{pair / fields}, {pair % fields * form.bits + half}, {form.bits}};
  Places found = {};
  const int count = form.bits / form.words();
  for (int word = 0; word < form.words(); ++word) {
    found.words[word] = word, found.counts[word] = count;
    found.shifts[word] = fields * form.bits + (pair - whole) * count + half;
  }
  return found;
}

// Returns the places of code t of a chunk. Most codes are in a single word.
Places places_of(const mm_linear& linear, const BlockForm& form, int t) {
  if (linear.dtype == MM_BF16) return paired_places(form, t);
  const int words = form.words(), whole = words * form.fields();
  if (form.table) return {{t / 8}, {t % 4 * 8 + t / 4 % 2 * 4}, {4}};
  if (t < whole) return {{t % words}, {t / words * form.bits}, {form.bits}};
  const int odd = t - whole;  // which leftover code: 0 or 1
  if (form.bits == 3) return {{odd, 2}, {30, 30 + odd}, {2, 1, 0}};
  if (form.bits == 5) return {{2 * odd, 2 * odd + 1, 4}, {30, 30, 30 + odd}, {2, 2, 1}};
  return {{0, 1, 2}, {30, 30, 30}, {2, 2, 2}};
}

// Returns the integer scales, followed by the minimums, of the group that contains value t of a step.
const char* group_at(const BlockForm& form, const char* step, int t) {
  return step + t / form.group * form.scale_bytes * 32;
}

struct Factors {
  float scale, min;  // a weight is scale * number - min
};

float half_at(const char* at) { return _cvtsh_ss(load_as<uint16_t>(at)); }

// Returns MXFP4's scale, 2^(e - 128).
float power_of(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23;
  return load_as<float>(&bits);
}

Factors factors_of(const BlockForm& form, const char* block, const char* group, int column) {
  if (form.type == kMXFP4) return {power_of((uint8_t)block[column]), 0};
  const float d = half_at(block + column * 2), companion = form.heads == 4 ? half_at(block + 64 + column * 2) : 0;
  if (form.scale_bytes == 0) return {d, -companion};
  const uint8_t scale = (uint8_t)group[column];
  if (form.type == kQ2_K) return {d * (float)(scale & 15), companion * (float)(scale >> 4)};
  if (form.scale_bytes == 2) return {d * (float)scale, companion * (float)(uint8_t)group[32 + column]};
  return {d * (float)(int8_t)scale, 0};
}

// `stored` returns the stored form of a file's code. `number_of` returns the number that a stored code encodes.
int stored(const mm_linear& linear, const BlockForm& form, int code) {
  if (linear.dtype != MM_BF16 || form.bits < 8) return code;
  return code < form.offset ? (form.offset - code) | 0x80 : code - form.offset;
}
int number_of(const mm_linear& linear, const BlockForm& form, int code) {
  if (linear.dtype == MM_BF16 && form.bits == 8) return code & 0x80 ? -(code & 0x7f) : code;
  if (!form.table) return code - form.offset;
  return (form.type == kMXFP4 ? kMXFP4Values : kIQ4Values)[code];
}

}  // namespace

int block_type_of(const mm_linear& linear, int64_t panel) {
  int run = 0;
  while (run + 1 < linear.num_runs && linear.runs[run + 1].panel <= panel) ++run;
  return linear.runs[run].type;
}

int64_t block_panel_at(const mm_linear& linear, int64_t panel) {
  int64_t at = 0;
  for (int run = 0; run < linear.num_runs && linear.runs[run].panel < panel; ++run) {
    const BlockForm form = block_form(linear.runs[run].type);
    const int64_t next = run + 1 < linear.num_runs ? linear.runs[run + 1].panel : panel;
    at += ((next < panel ? next : panel) - linear.runs[run].panel) * (linear.k / form.span) * form.block_bytes();
  }
  return at;
}

void block_encode_column(const mm_linear& linear, int type, const uint8_t* row, int column, char* panel) {
  const BlockForm form = block_form(type);
  Unpacked found;
  for (int64_t i = 0; i < linear.k / form.span; ++i, row += form.file_bytes, panel += form.block_bytes()) {
    unpack(form, row, found);
    if (form.type == kMXFP4)
      panel[column] = (char)found.d;
    else
      store_as(panel + column * 2, found.d);
    if (form.heads == 4) store_as(panel + 64 + column * 2, found.companion);
    char* step = panel + form.heads * 32;
    for (int t = 0; t < form.span; t += 32, step += form.step_bytes()) {
      for (int at = 0; at < 32 && form.scale_bytes; at += form.group) {
        char* group = step + at / form.group * form.scale_bytes * 32;
        group[column] = (char)found.scales[(t + at) / form.group];
        if (form.scale_bytes == 2) group[32 + column] = (char)found.mins[(t + at) / form.group];
      }
      for (int at = 0; at < 32; ++at) {
        uint32_t* words = (uint32_t*)(step + form.step_scales()) + at / form.chunk() * form.words() * 32 + column;
        const Places places = places_of(linear, form, at % form.chunk());
        uint32_t code = stored(linear, form, found.codes[t + at]);
        for (int part = 0; part < kMostParts && places.counts[part]; code >>= places.counts[part++])
          words[places.words[part] * 32] |= (code & ((1u << places.counts[part]) - 1)) << places.shifts[part];
      }
    }
  }
}

void block_decode_column(const mm_linear& linear, int type, const char* panel, int column, float* out) {
  const BlockForm form = block_form(type);
  for (int64_t i = 0; i < linear.k / form.span; ++i, panel += form.block_bytes()) {
    const char* step = panel + form.heads * 32;
    for (int t = 0; t < form.span; t += 32, step += form.step_bytes()) {
      Factors by = {};
      for (int at = 0; at < 32; ++at) {
        if (at % form.group == 0) by = factors_of(form, panel, group_at(form, step, at), column);
        const uint32_t* words =
            (const uint32_t*)(step + form.step_scales()) + at / form.chunk() * form.words() * 32 + column;
        const Places places = places_of(linear, form, at % form.chunk());
        int code = 0;
        for (int part = 0, below = 0; part < kMostParts && places.counts[part]; below += places.counts[part++])
          code |= (int)(words[places.words[part] * 32] >> places.shifts[part] & ((1u << places.counts[part]) - 1))
                  << below;
        const float product = (float)number_of(linear, form, code) * by.scale;
        // Types without minimums skip the subtraction, so a zero keeps its sign.
        *out++ = form.heads == 4 ? product - by.min : product;
      }
    }
  }
}

}  // namespace mm
