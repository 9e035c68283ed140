// Norms, rotation and additions over rows, in float32 or with bfloat16 rounding.
#include "decoder/rows.h"

#include "common/row_vec.h"
#include "linear/linear.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // minimum number of values for several threads
constexpr int kMaxHalf = 128;

inline float scale_of(f16v squares, int size, float eps) { return 1.0f / sqrtf(sum_row(squares) / size + eps); }

// ONCE: a single rounding, after the multiplication by the weight.
template <bool BF16, bool ONCE = false>
void norm_row(const char* x, const float* weight, int size, float eps, char* out) {
  f16v squares[2] = {};
  int at = 0;
  for (; at + 32 <= size; at += 32)
    for (int i = 0; i < 2; ++i) {
      f16v v = load_row<BF16>(x, at + i * 16);
      squares[i] += v * v;
    }
  for (; at < size; at += 16) {
    f16v v = load_part<BF16>(x, at, size - at);
    squares[0] += v * v;
  }
  f16v scale = splat(scale_of(squares[0] + squares[1], size, eps));
  for (at = 0; at + 16 <= size; at += 16)
    store_row<BF16>(out, at, rounded<(BF16 && !ONCE)>(load_row<BF16>(x, at) * scale) * load_as<f16v>(weight + at));
  if (int rest = size - at; rest > 0) {
    f16v w = load_part<false>((const char*)weight, at, rest);
    store_part<BF16>(out, at, rounded<(BF16 && !ONCE)>(load_part<BF16>(x, at, rest) * scale) * w, rest);
  }
}

template <bool BF16>
MM_INLINE void rotate_head(char* head, const float* weight, float eps, const float* cos, const float* sin, int half) {
  f16v low[kMaxHalf / 16], high[kMaxHalf / 16], squares = {};
  int vectors = (half + 15) / 16;
  for (int i = 0; i < vectors; ++i) {
    low[i] = load_part<BF16>(head, i * 16, half - i * 16);
    high[i] = load_part<BF16>(head, half + i * 16, half - i * 16);
    squares += low[i] * low[i];
    squares += high[i] * high[i];
  }
  f16v scale = splat(weight ? scale_of(squares, 2 * half, eps) : 1.0f), one = splat(1.0f);
  for (int i = 0; i < vectors; ++i) {
    int count = half - i * 16;
    f16v c = load_part<false>((const char*)cos, i * 16, count);
    f16v s = load_part<false>((const char*)sin, i * 16, count);
    f16v w0 = weight ? load_part<false>((const char*)weight, i * 16, count) : one;
    f16v w1 = weight ? load_part<false>((const char*)(weight + half), i * 16, count) : one;
    f16v x0 = rounded<BF16>(rounded<BF16>(low[i] * scale) * w0);
    f16v x1 = rounded<BF16>(rounded<BF16>(high[i] * scale) * w1);
    store_part<BF16>(head, i * 16, rounded<BF16>(x0 * c) - rounded<BF16>(x1 * s), count);
    store_part<BF16>(head, half + i * 16, rounded<BF16>(x1 * c) + rounded<BF16>(x0 * s), count);
  }
}

template <bool BF16>
void rotate_row(char* row, int at, const HeadNorm& how) {
  const int rotated = how.rotary_dim ? how.rotary_dim : how.head_dim;
  int half = rotated / 2, num_qk = how.num_heads + how.num_kv_heads;
  const float *cos = how.cos + (int64_t)at * half, *sin = how.sin + (int64_t)at * half;
  for (int head = 0; head < num_qk; ++head) {
    const float* weight = head < how.num_heads ? how.q_weight : how.k_weight;
    char* values = row + (int64_t)head * how.head_dim * (BF16 ? 2 : 4);
    if (weight && (how.once || rotated < how.head_dim)) {  // rotate_head rounds twice and skips unrotated values
      (how.once ? norm_row<BF16, true> : norm_row<BF16>)(values, weight, how.head_dim, how.eps, values);
      weight = nullptr;
    }
    rotate_head<BF16>(values, weight, how.eps, cos, sin, half);
  }
}

// out = x * sigmoid(gate); the sigmoid is rounded before the product.
template <bool BF16>
void gate_values(const char* x, const char* gate, int size, char* out) {
  for (int at = 0; at < size; at += 16) {
    const int rest = size - at;
    f16v open = rounded<BF16>(1.0f / (1.0f + exp_clamped(-load_part<BF16>(gate, at, rest))));
    store_part<BF16>(out, at, load_part<BF16>(x, at, rest) * open, rest);
  }
}

template <bool BF16>
void add_values(char* x, const char* y, int64_t begin, int64_t end) {
  int64_t at = begin;
  for (; at + 16 <= end; at += 16) store_row<BF16>(x, at, load_row<BF16>(x, at) + load_row<BF16>(y, at));
  if (int rest = (int)(end - at); rest > 0)
    store_part<BF16>(x, at, load_part<BF16>(x, at, rest) + load_part<BF16>(y, at, rest), rest);
}

inline char* row_of(const Rows& rows, int i) {
  return (char*)rows.data + i * rows.stride * (rows.dtype == MM_BF16 ? 2 : 4);
}

}  // namespace

void rms_norm_rows(const Rows& x, const float* weight, int size, float eps, const Rows& out, bool once) {
  const auto norm = x.dtype != MM_BF16 ? norm_row<false> : once ? norm_row<true, true> : norm_row<true>;
#pragma omp parallel for schedule(static) if ((int64_t)x.count * size > kSmall)
  for (int i = 0; i < x.count; ++i) norm(row_of(x, i), weight, size, eps, row_of(out, i));
}

void gate_rows(const Rows& x, const Rows& gate, int size, const Rows& out) {
#pragma omp parallel for schedule(static) if ((int64_t)x.count * size > kSmall)
  for (int i = 0; i < x.count; ++i)
    (x.dtype == MM_BF16 ? gate_values<true> : gate_values<false>)(row_of(x, i), row_of(gate, i), size, row_of(out, i));
}

void norm_and_rotate(const Rows& qkv, const HeadNorm& how) {
#pragma omp parallel for schedule(static) if (qkv.count * qkv.stride > kSmall)
  for (int i = 0; i < qkv.count; ++i)
    (qkv.dtype == MM_BF16 ? rotate_row<true> : rotate_row<false>)(row_of(qkv, i), i, how);
}

void copy_rows(const Rows& x, int size, const Rows& out) {
  const size_t bytes = (size_t)size * (x.dtype == MM_BF16 ? 2 : 4);
#pragma omp parallel for schedule(static) if ((int64_t)x.count * size > kSmall)
  for (int i = 0; i < x.count; ++i) memcpy(row_of(out, i), row_of(x, i), bytes);
}

void add_rows(const Rows& x, const void* y, int size) {
#pragma omp parallel for schedule(static) if ((int64_t)x.count * size > kSmall)
  for (int i = 0; i < x.count; ++i)
    (x.dtype == MM_BF16 ? add_values<true> : add_values<false>)((char*)x.data, (const char*)y, (int64_t)i * size,
                                                                (int64_t)(i + 1) * size);
}

}  // namespace mm
