// Converts float32 sums to y: bias, silu(gate) * up, rounding, residual.
#include "common/row_vec.h"
#include "linear/job.h"

namespace mm {
namespace {

// Stores 32 neighbouring values of y.
template <bool BF16>
MM_INLINE void store32(char* to, f16v low, f16v high) {
  if constexpr (!BF16) {
    store_as(to, low);
    store_as(to + 64, high);
    return;
  }
#if defined(__AVX512BF16__)
  store_as(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  store_as(to, narrow(low));
  store_as(to + 32, narrow(high));
#endif
}

// Rounds and stores one row of a whole panel, after adding the residual. ROUND: the layer is bfloat16.
template <bool ROUND, bool YBF16>
MM_INLINE void finish32(f16v low, f16v high, char* y, const char* residual) {
  constexpr int half = YBF16 ? 32 : 64;
  if (residual) {
    low = load_row<YBF16>(residual, 0) + rounded<ROUND>(low);
    high = load_row<YBF16>(residual + half, 0) + rounded<ROUND>(high);
  } else if (ROUND && !YBF16) {
    low = round_bf16(low);
    high = round_bf16(high);
  }
  store32<YBF16>(y, low, high);
}

template <bool ROUND, bool YBF16>
void store_plain(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel) {
  constexpr int size = YBF16 ? 2 : 4;
  int column = panel * kPanel, count = job.linear->n - column < kPanel ? job.linear->n - column : kPanel;
  f16v bias[2] = {};
  if (job.linear->bias) memcpy(bias, job.linear->bias + column, count * sizeof(float));
  for (int i = 0; i < rows; ++i) {
    int64_t at = ((row0 + i) * job.y_stride + column) * size;
    char* y = (char*)job.y + at;
    const char* residual = job.residual ? (const char*)job.residual + at : nullptr;
    f16v low = load_as<f16v>(c + (int64_t)i * ldc) + bias[0];
    f16v high = load_as<f16v>(c + (int64_t)i * ldc + 16) + bias[1];
    if (count == kPanel) {
      finish32<ROUND, YBF16>(low, high, y, residual);
      continue;
    }
    char part[kPanel * size] = {}, part_residual[kPanel * size] = {};
    if (residual) memcpy(part_residual, residual, count * size);
    finish32<ROUND, YBF16>(low, high, part, residual ? part_residual : nullptr);
    memcpy(y, part, count * size);
  }
}

// Stores silu(gate) * up to columns [column, column + count) of y; `count` is at most kWide.
template <bool BF16>
MM_INLINE void store_products(const LinearJob& job, const float* sums, int64_t row, int column, int count) {
  const int i = job.linear->n / 2;
  wide gate = load_as<wide>(sums), up = load_as<wide>(sums + 16);
  if (job.linear->bias) {
    gate += load_part<false, wide>((const char*)job.linear->bias, column, count);
    up += load_part<false, wide>((const char*)job.linear->bias, i + column, count);
  }
  gate = rounded<BF16>(gate), up = rounded<BF16>(up);
  if (job.added) {
    const char* added = (const char*)(job.added + row * job.linear->n);
    gate = rounded<BF16>(gate + load_part<false, wide>(added, column, count));
    up = rounded<BF16>(up + load_part<false, wide>(added, i + column, count));
  }
  store_part<BF16>((char*)job.y, row * job.y_stride + column, rounded<BF16>(silu(gate)) * up, count);
}

template <bool BF16>
void store_gate_up(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel) {
  const int i = job.linear->n / 2;
  for (int row = 0; row < rows; ++row)
    for (int at = 0; at < 16; at += kWide) {
      const int column = panel * 16 + at, count = i - column < kWide ? i - column : kWide;
      if (count > 0) store_products<BF16>(job, c + (int64_t)row * ldc + at, row0 + row, column, count);
    }
}

}  // namespace

void linear_store(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel) {
  auto store = job.gate_up   ? (job.bf16() ? store_gate_up<true> : store_gate_up<false>)
               : !job.bf16() ? store_plain<false, false>
               : job.y_fp32  ? store_plain<true, false>
                             : store_plain<true, true>;
  store(job, c, ldc, row0, rows, panel);
}

}  // namespace mm
