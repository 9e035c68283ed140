// Packs weights into panels, and unpacks them.
#include <cstring>
#include <memory>

#include "common/vec.h"
#include "linear/codes.h"
#include "linear/int8.h"
#include "linear/job.h"

namespace mm {
namespace {

// Returns the row of w for a panel's column, or -1 for padding. `half`: as in mm_linear_pack.
int64_t source_row(int64_t panel, int column, int32_t n, int32_t half) {
  if (half == 0) {
    int64_t row = panel * kPanel + column;
    return row < n ? row : -1;
  }
  int64_t row = panel * 16 + column % 16;
  return row < half ? row + (column < 16 ? 0 : half) : -1;
}

// Returns the offset in a panel of a column's value at position t of k, in elements of 2 bytes.
inline int64_t place_bf16(int column, int64_t t) { return t / 2 * 2 * kPanel + column * 2 + t % 2; }

// `rows`: the row of w for each column; NULL for padding and for rows outside the chunk.
void pack_panel_bf16(const uint16_t* const* rows, int32_t k, uint16_t* out) {
  int64_t whole = k / kStep * kStep;
  for (int64_t step = 0; step < whole; step += kStep)  // reads one cache line of each row at a time
    for (int column = 0; column < kPanel; ++column) {
      uint16_t* to = out + place_bf16(column, step);
      if (!rows[column]) continue;
      for (int pair = 0; pair < 16; ++pair) memcpy(to + pair * 2 * kPanel, rows[column] + step + pair * 2, 4);
    }
  for (int column = 0; column < kPanel; ++column)
    for (int64_t t = whole; t < k && rows[column]; ++t) out[place_bf16(column, t)] = rows[column][t];
}

void pack_panel_fp32(const float* const* rows, int32_t k, float* out) {
  constexpr int kLine = 16;
  for (int64_t begin = 0; begin < k; begin += kLine) {
    int64_t end = begin + kLine < k ? begin + kLine : k;
    for (int column = 0; column < kPanel; ++column)
      for (int64_t t = begin; t < end && rows[column]; ++t) out[t * kPanel + column] = rows[column][t];
  }
}

// A chunk of w: rows [count, k] from row `first` on. Codes have scales, and optionally mins.
struct Piece {
  const void* w;
  const float *scales, *mins;
  int32_t first, count;
};

// `rows`: each column's row index in the chunk, or -1.
void pack_panel_codes(const mm_linear& linear, const Piece& piece, const int64_t* rows, char* out) {
  int64_t k = linear.k, groups = ceil_div(k, linear.group);
  for (int64_t i = 0; i < groups; ++i, out += group_step(linear)) {
    int64_t first = i * linear.group, count = k - first < linear.group ? k - first : linear.group;
    for (int column = 0; column < kPanel; ++column) {
      int64_t row = rows[column];
      if (row < 0) continue;
      const auto encode = linear.x_form ? int8_encode : encode_column;
      encode(linear, out, column, (const uint8_t*)piece.w + row * k + first, count, piece.scales[row * groups + i],
             piece.mins ? piece.mins[row * groups + i] : 0);
    }
  }
}

// Returns a row's size in bytes. `type`: the block type.
int64_t stored_bytes(const mm_linear& linear, int type) {
  if (linear.form != MM_BLOCKS) return (int64_t)linear.k * (linear.dtype == MM_BF16 ? 2 : 4);
  return linear.k / block_form(type).span * block_form(type).file_bytes;
}

void pack_panel_blocks(const mm_linear& linear, int type, const uint8_t* const* rows, char* out) {
  for (int column = 0; column < kPanel; ++column)
    if (rows[column]) block_encode_column(linear, type, rows[column], column, out);
}

void pack_panel(const mm_linear& linear, const Piece& piece, int64_t panel, int32_t half, void* out) {
  int64_t rows[kPanel];
  const void* values[kPanel];
  const int type = linear.form == MM_BLOCKS ? block_type_of(linear, panel) : 0;
  const int64_t row_bytes = stored_bytes(linear, type);
  for (int column = 0; column < kPanel; ++column) {
    int64_t row = source_row(panel, column, linear.n, half) - piece.first;
    bool inside = row >= 0 && row < piece.count;
    rows[column] = inside ? row : -1;
    values[column] = inside ? (const char*)piece.w + row * row_bytes : nullptr;
  }
  if (linear.form == MM_BLOCKS)
    pack_panel_blocks(linear, type, (const uint8_t* const*)values, (char*)out);
  else if (linear.group)
    pack_panel_codes(linear, piece, rows, (char*)out);
  else if (linear.dtype == MM_BF16)
    pack_panel_bf16((const uint16_t* const*)values, linear.k, (uint16_t*)out);
  else
    pack_panel_fp32((const float* const*)values, linear.k, (float*)out);
}

void pack(const mm_linear& linear, const Piece& piece, int32_t half, void* packed) {
  int64_t begin = piece.first, end = begin + piece.count, width = half ? 16 : kPanel;
  if (half && begin < half && end > half)  // the chunk has rows of gate and rows of up
    begin = 0, end = half;
  else if (half && begin >= half)
    begin -= half, end -= half;
#pragma omp parallel for schedule(static) if ((int64_t)piece.count * linear.k > 100000)
  for (int64_t panel = begin / width; panel < ceil_div(end, width); ++panel)
    pack_panel(linear, piece, panel, half, (char*)packed + panel_at(linear, panel));
}

// Unpacks a column of a panel of GGUF blocks to k values in the layer's dtype.
void column_of_blocks(const mm_linear& linear, int type, const char* panel, int column, void* out) {
  if (linear.dtype == MM_FP32) return block_decode_column(linear, type, panel, column, (float*)out);
  const std::unique_ptr<float[]> values(new float[linear.k]);
  block_decode_column(linear, type, panel, column, values.get());
  for (int64_t t = 0; t < linear.k; ++t) ((uint16_t*)out)[t] = narrow(splat(values[t]))[0];
}

// Unpacks a column of a panel to k values in the layer's dtype. `index`: the panel's index.
void column_of(const mm_linear& linear, int64_t index, const char* panel, int column, void* out) {
  int64_t k = linear.k;
  uint16_t* to = (uint16_t*)out;
  const uint16_t* from = (const uint16_t*)panel;
  if (linear.form == MM_BLOCKS) {
    column_of_blocks(linear, block_type_of(linear, index), panel, column, out);
  } else if (linear.group) {
    const auto decode = linear.x_form ? int8_decode_one : decode_one;
    for (int64_t t = 0; t < k; ++t) {
      const char* group = panel + t / linear.group * group_step(linear);
      const float value = decode(linear, group, column, t % linear.group);
      if (linear.dtype == MM_FP32)
        ((float*)out)[t] = value;
      else
        to[t] = narrow(splat(value))[0];
    }
  } else if (linear.dtype == MM_FP32) {
    for (int64_t t = 0; t < k; ++t) ((float*)out)[t] = ((const float*)panel)[t * kPanel + column];
  } else {
    for (int64_t t = 0; t + 1 < k; t += 2) memcpy(to + t, from + place_bf16(column, t), 4);
    if (k % 2) to[k - 1] = from[place_bf16(column, k - 1)];
  }
}

}  // namespace
}  // namespace mm

extern "C" {

int64_t mm_linear_bytes(const mm_linear* linear) {
  const int64_t count = mm::alternating(*linear);
  if (linear->form == MM_BLOCKS) return mm::block_panel_at(*linear, mm::ceil_div(linear->n, mm::kPanel));
  return mm::ceil_div(linear->n, mm::kPanel * count) * count * mm::linear_panel_bytes(*linear);
}

void mm_linear_pack(const mm_linear* linear, const void* w, const float* scales, const float* mins, int32_t first,
                    int32_t count, int32_t half, void* packed) {
  mm::pack(*linear, {w, scales, mins, first, count}, half, packed);
}

void mm_linear_rows(const mm_linear* linear, const int64_t* rows, int32_t count, void* out) {
  int64_t n = linear->n, row_bytes = (int64_t)linear->k * (linear->dtype == MM_BF16 ? 2 : 4);
#pragma omp parallel for schedule(static) if ((int64_t)count * linear->k > 100000)
  for (int32_t i = 0; i < count; ++i) {
    int64_t row = rows[i];
    char* to = (char*)out + i * row_bytes;
    const int64_t panel = row / mm::kPanel;
    const char* packed = (const char*)linear->packed;
    if (row >= 0 && row < n)
      mm::column_of(*linear, panel, packed + mm::panel_at(*linear, panel), (int)(row % mm::kPanel), to);
    else
      memset(to, 0, row_bytes);
  }
}

}  // extern "C"
