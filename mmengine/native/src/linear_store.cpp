// From float32 sums to y: bias, silu(gate) * up, rounding, residual.
#include "linear_job.h"
#include "linear_vec.h"

namespace mm {
namespace {

// 16 values of the dtype of a linear, or of y.
template <bool BF16>
MM_INLINE f16v load16(const void* from) {
  if constexpr (BF16) return widen(load_as<h16v>(from));
  return load_as<f16v>(from);
}

template <bool BF16>
MM_INLINE void store16(void* to, f16v v) {
  if constexpr (BF16)
    store_as(to, narrow(v));
  else
    store_as(to, v);
}

template <bool BF16>
MM_INLINE f16v rounded(f16v v) {
  if constexpr (BF16) return round_bf16(v);
  return v;
}

// `count` of the 16 values are inside y; a partial vector goes through a buffer.
template <bool BF16>
MM_INLINE void finish16(f16v sum, void* y, const void* residual, int count) {
  constexpr int size = BF16 ? 2 : 4;
  alignas(64) char part[64] = {};
  if (count == 16) {
    if (residual) sum = load16<BF16>(residual) + rounded<BF16>(sum);
    store16<BF16>(y, sum);
    return;
  }
  if (residual) {
    memcpy(part, residual, count * size);
    sum = load16<BF16>(part) + rounded<BF16>(sum);
  }
  store16<BF16>(part, sum);
  memcpy(y, part, count * size);
}


template <bool YBF16>
void store_plain(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel) {
  constexpr int size = YBF16 ? 2 : 4;
  int n = job.linear->n;
  for (int half = 0; half < 2; ++half) {
    int column = panel * kPanel + half * 16;
    int count = n - column < 16 ? n - column : 16;
    if (count <= 0) return;
    f16v bias = {};
    if (job.linear->bias) memcpy(&bias, job.linear->bias + column, count * sizeof(float));
    for (int i = 0; i < rows; ++i) {
      int64_t at = ((row0 + i) * job.y_stride + column) * size;
      const char* residual = job.residual ? (const char*)job.residual + at : nullptr;
      f16v sum = load_as<f16v>(c + (int64_t)i * ldc + half * 16) + bias;
      if (job.bf16() && !YBF16) sum = round_bf16(sum);
      finish16<YBF16>(sum, (char*)job.y + at, residual, count);
    }
  }
}

template <bool BF16>
void store_gate_up(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel) {
  constexpr int size = BF16 ? 2 : 4;
  int i = job.linear->n / 2, column = panel * 16;
  int count = i - column < 16 ? i - column : 16;
  f16v gate_bias = {}, up_bias = {};
  if (job.linear->bias) {
    memcpy(&gate_bias, job.linear->bias + column, count * sizeof(float));
    memcpy(&up_bias, job.linear->bias + i + column, count * sizeof(float));
  }
  for (int row = 0; row < rows; ++row) {
    const float* sums = c + (int64_t)row * ldc;
    f16v gate = rounded<BF16>(load_as<f16v>(sums) + gate_bias);
    f16v up = rounded<BF16>(load_as<f16v>(sums + 16) + up_bias);
    f16v product = rounded<BF16>(silu(gate)) * up;
    finish16<BF16>(product, (char*)job.y + ((row0 + row) * job.y_stride + column) * size, nullptr, count);
  }
}

}  // namespace

void linear_store(const LinearJob& job, const float* c, int ldc, int row0, int rows, int panel) {
  if (job.gate_up)
    (job.bf16() ? store_gate_up<true> : store_gate_up<false>)(job, c, ldc, row0, rows, panel);
  else
    (job.bf16() && !job.y_fp32 ? store_plain<true> : store_plain<false>)(job, c, ldc, row0, rows, panel);
}

}  // namespace mm
