// Weights into panels and back.
#include <cstring>

#include "linear_job.h"

namespace mm {
namespace {

// The row of w behind a column of a panel, or -1 for padding. `half` is i where gate and up share panels.
int64_t source_row(int64_t panel, int column, int32_t n, int32_t half) {
  if (half == 0) {
    int64_t row = panel * kPanel + column;
    return row < n ? row : -1;
  }
  int64_t row = panel * 16 + column % 16;
  return row < half ? row + (column < 16 ? 0 : half) : -1;
}

// Where a column's value at position t of k lies in its panel, in elements of 2 bytes.
inline int64_t place_bf16(int column, int64_t t) {
  return t / 2 * 2 * kPanel + column * 2 + t % 2;
}

// rows are those of w behind the panel's columns, NULL for padding and for what another piece brings.
void pack_panel_bf16(const uint16_t* const* rows, int32_t k, uint16_t* out) {
  int64_t whole = k / kStep * kStep;
  for (int64_t step = 0; step < whole; step += kStep)  // a cache line of a row after the other
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

// Some rows of w, [count, k], from row `first` on.
struct Piece {
  const void* w;
  int32_t first, count;
};

template <class T, class Pack>
void pack_panel(Piece piece, int64_t panel, int32_t n, int32_t k, int32_t half, void* out, Pack pack) {
  const T* rows[kPanel];
  for (int column = 0; column < kPanel; ++column) {
    int64_t row = source_row(panel, column, n, half) - piece.first;
    rows[column] = row < 0 || row >= piece.count ? nullptr : (const T*)piece.w + row * k;
  }
  pack(rows, k, (T*)out);
}

void pack(Piece piece, int32_t n, int32_t k, int32_t dtype, int32_t half, void* packed) {
  int64_t panels = ceil_div(n, kPanel), bytes = mm_linear_bytes(n, k, dtype) / panels;
  int64_t begin = piece.first, end = begin + piece.count, width = half ? 16 : kPanel;
  if (half && begin < half && end > half)  // of gate and of up
    begin = 0, end = half;
  else if (half && begin >= half)
    begin -= half, end -= half;
#pragma omp parallel for schedule(static) if ((int64_t)piece.count * k > 100000)
  for (int64_t panel = begin / width; panel < ceil_div(end, width); ++panel) {
    void* out = (char*)packed + panel * bytes;
    if (dtype == MM_BF16)
      pack_panel<uint16_t>(piece, panel, n, k, half, out, pack_panel_bf16);
    else
      pack_panel<float>(piece, panel, n, k, half, out, pack_panel_fp32);
  }
}

}  // namespace
}  // namespace mm

extern "C" {

int64_t mm_linear_bytes(int32_t n, int32_t k, int32_t dtype) {
  int64_t panel = dtype == MM_BF16 ? mm::ceil_div(k, mm::kStep) * 2048 : (int64_t)k * 128;
  return mm::ceil_div(n, mm::kPanel) * panel;
}

void mm_linear_pack(const void* w, int32_t first, int32_t count, int32_t n, int32_t k, int32_t dtype,
                    int32_t half, void* packed) {
  mm::pack({w, first, count}, n, k, dtype, half, packed);
}

void mm_linear_rows(const mm_linear* linear, const int64_t* rows, int32_t count, void* out) {
  int64_t n = linear->n, k = linear->k;
  int64_t bytes = mm_linear_bytes(linear->n, linear->k, linear->dtype) / mm::ceil_div(n, mm::kPanel);
#pragma omp parallel for schedule(static) if (count * k > 100000)
  for (int32_t i = 0; i < count; ++i) {
    int64_t row = rows[i];
    bool inside = row >= 0 && row < n;
    const char* panel = (const char*)linear->packed + (inside ? row / mm::kPanel : 0) * bytes;
    int column = inside ? (int)(row % mm::kPanel) : 0;
    if (linear->dtype == MM_FP32) {
      float* to = (float*)out + i * k;
      const float* from = (const float*)panel + column;
      for (int64_t t = 0; t < k; ++t) to[t] = inside ? from[t * mm::kPanel] : 0.0f;
    } else {
      uint16_t* to = (uint16_t*)out + i * k;
      const uint16_t* from = (const uint16_t*)panel;
      for (int64_t t = 0; t + 1 < k; t += 2) memcpy(to + t, from + mm::place_bf16(column, t), 4);
      if (k % 2) to[k - 1] = from[mm::place_bf16(column, k - 1)];
      if (!inside) memset(to, 0, k * 2);
    }
  }
}

}  // extern "C"
