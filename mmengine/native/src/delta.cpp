// The gated delta net: channels, gates, the recurrence, the norm of what it gives, and what stays of the inputs.
#include "delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "row_vec.h"

namespace mm {
namespace {

constexpr int kBlock = 32;  // columns of S at a time: with 128 rows half of a first cache

template <bool BF16>
struct Mixer {
  const mm_delta_sizes& sizes;
  const mm_delta& weights;
  const mm_state_step& step;
  int64_t layer;
  const char* projected;
  float eps;
  char* mixed;

  static constexpr int kBytes = BF16 ? 2 : 4;
  int64_t keys() const { return (int64_t)sizes.num_key_heads * sizes.key_dim; }
  int64_t values() const { return (int64_t)sizes.num_heads * sizes.value_dim; }
  int64_t width() const { return 2 * keys() + values(); }
  int64_t input_width() const { return width() + 2 * sizes.num_heads; }

  int work_of(int row) const { return step.work_starts[row + 1] - step.work_starts[row]; }
  int stayed(int row) const { return work_of(row) - (step.query_starts[row + 1] - step.query_starts[row]); }
  int sure(int row) const { return stayed(row) + step.certain[row]; }
  char* conv(int slot) const {
    return (char*)step.conv + (slot * step.conv_slot + layer * step.conv_layer) * kBytes;
  }
  char* pending(int row, int place) const {
    return (char*)step.pending +
           (step.rows[row] * step.pending_row + layer * step.pending_layer + place * input_width()) * kBytes;
  }
  float* state(int slot, int head) const {
    return step.recurrent + slot * step.recurrent_slot + layer * step.recurrent_layer +
           (int64_t)head * sizes.key_dim * sizes.value_dim;
  }

  // The channels of work `at` of a row; of negative ones those that entered the convolution before.
  const char* channels(int row, int at) const {
    if (at < 0) return conv(step.slots[row]) + (sizes.taps - 1 + at) * width() * kBytes;
    const int before = stayed(row);
    if (at < before) return pending(row, at);
    return projected + (step.query_starts[row] + at - before) * (width() + values()) * kBytes;
  }

  const char* numbers(int row, int at) const {
    const int before = stayed(row);
    if (at < before) return pending(row, at) + width() * kBytes;
    return (const char*)step.ba + (int64_t)(step.query_starts[row] + at - before) * 2 * sizes.num_heads * kBytes;
  }

  static float number(const char* from, int at) { return load_part<BF16>(from, at, 1)[0]; }

  // q, k and v of one token.
  void activate(int row, int at) const {
    float* out = step.acts + (step.work_starts[row] + at) * width();
    const char* taps[MM_MAX_TAPS];
    for (int t = 0; t < sizes.taps; ++t) taps[t] = channels(row, at - (sizes.taps - 1) + t);
    const int64_t all = width();
    for (int64_t c = 0; c < all; c += 16) {
      const int count = (int)std::min<int64_t>(16, all - c);
      f16v sum = {};
      for (int t = 0; t < sizes.taps; ++t)
        sum = fused(load_part<BF16>(taps[t], c, count),
                    load_part<false>((const char*)(weights.conv + t * all), c, count), sum);
      store_part<false>((char*)out, c, rounded<BF16>(silu(rounded<BF16>(sum))), count);
    }
    const float scale = 1.0f / sqrtf((float)sizes.key_dim);
    for (int head = 0; head < 2 * sizes.num_key_heads; ++head)
      to_unit(out + (int64_t)head * sizes.key_dim, head < sizes.num_key_heads ? scale : 1.0f);
  }

  void to_unit(float* x, float scale) const {
    f16v squares = {};
    for (int i = 0; i < sizes.key_dim; i += 16) {
      f16v v = load_part<false>((const char*)x, i, sizes.key_dim - i);
      squares = fused(v, v, squares);
    }
    const float by = 1.0f / sqrtf(sum16(squares) + 1e-6f);
    for (int i = 0; i < sizes.key_dim; ++i) x[i] = x[i] * by * scale;
  }

  // The decay and beta of one token's heads.
  void open_gates(int row, int at) const {
    const char* from = numbers(row, at);
    float* out = step.gates + (int64_t)(step.work_starts[row] + at) * 2 * sizes.num_heads;
    for (int head = 0; head < sizes.num_heads; ++head) {
      const float b = number(from, head), a = number(from, sizes.num_heads + head) + weights.dt_bias[head];
      const float soft = a > 20.0f ? a : log1pf(expf(a));
      out[head] = expf(weights.decay[head] * soft);
      out[sizes.num_heads + head] = rounded<BF16>(splat(1.0f / (1.0f + expf(-b))))[0];
    }
  }

  // All work of a row over N * 16 columns of a head's S.
  template <int N>
  void recur(int row, int head, int column) const {
    alignas(64) float block[MM_MAX_KEY_DIM * kBlock];
    const int slot = step.slots[row], key = head / (sizes.num_heads / sizes.num_key_heads);
    copy<N>(state(slot, head) + column, sizes.value_dim, block, kBlock);
    const int before = stayed(row), last = sure(row), count = work_of(row);
    int kept = step.kept_starts[row];
    for (int at = 0; at < count; ++at) {
      const int64_t work = step.work_starts[row] + at;
      const float* acts = step.acts + work * width();
      const float* gates = step.gates + work * 2 * sizes.num_heads;
      f16v out[N];
      correct<N>(block, acts + key * sizes.key_dim, acts + keys() + key * sizes.key_dim,
                 acts + 2 * keys() + (int64_t)head * sizes.value_dim + column, gates[head],
                 gates[sizes.num_heads + head], out);
      if (at >= before) {
        const int64_t to = (step.query_starts[row] + at - before) * values() + head * sizes.value_dim + column;
        for (int n = 0; n < N; ++n) store16<BF16>(mixed, to + n * 16, out[n]);
      }
      for (; kept < step.kept_starts[row + 1] && step.kept_after[kept] == at + 1; ++kept)
        copy<N>(block, kBlock, state(step.kept_slots[kept], head) + column, sizes.value_dim);
      if (at + 1 == last) copy<N>(block, kBlock, state(slot, head) + column, sizes.value_dim);
    }
  }

  template <int N>
  void copy(const float* from, int64_t from_stride, float* to, int64_t to_stride) const {
    for (int i = 0; i < sizes.key_dim; ++i)
      for (int n = 0; n < N; ++n)
        store_as(to + i * to_stride + n * 16, load_as<f16v>(from + i * from_stride + n * 16));
  }

  // One token: S and what it gives. Even and odd rows are summed apart, for the processor's sake.
  template <int N>
  void correct(float* s, const float* q, const float* k, const float* v, float decay, float beta, f16v* out) const {
    f16v even[N] = {}, odd[N] = {}, delta[N];
    const int pairs = sizes.key_dim / 2 * 2;
    for (int i = 0; i < pairs; i += 2) {
      read_row<N>(s, k, i, even);
      read_row<N>(s, k, i + 1, odd);
    }
    if (pairs < sizes.key_dim) read_row<N>(s, k, pairs, even);
    for (int n = 0; n < N; ++n) delta[n] = (load_as<f16v>(v + n * 16) - decay * (even[n] + odd[n])) * beta;
    for (int n = 0; n < N; ++n) even[n] = odd[n] = f16v{};
    for (int i = 0; i < pairs; i += 2) {
      write_row<N>(s, q, k, i, decay, delta, even);
      write_row<N>(s, q, k, i + 1, decay, delta, odd);
    }
    if (pairs < sizes.key_dim) write_row<N>(s, q, k, pairs, decay, delta, even);
    for (int n = 0; n < N; ++n) out[n] = even[n] + odd[n];
  }

  template <int N>
  MM_INLINE void read_row(const float* s, const float* k, int i, f16v* sums) {
    for (int n = 0; n < N; ++n) sums[n] = fused(load_as<f16v>(s + i * kBlock + n * 16), splat(k[i]), sums[n]);
  }

  template <int N>
  MM_INLINE void write_row(float* s, const float* q, const float* k, int i, float decay, const f16v* delta,
                           f16v* sums) {
    for (int n = 0; n < N; ++n) {
      f16v next = fused(splat(k[i]), delta[n], decay * load_as<f16v>(s + i * kBlock + n * 16));
      store_as(s + i * kBlock + n * 16, next);
      sums[n] = fused(next, splat(q[i]), sums[n]);
    }
  }

  // The norm of a token's heads, and their gates.
  void norm_and_gate(int64_t token) const {
    const char* gate = projected + (token * (width() + values()) + width()) * kBytes;
    for (int head = 0; head < sizes.num_heads; ++head) {
      const int64_t first = head * sizes.value_dim;
      f16v squares = {};
      for (int i = 0; i < sizes.value_dim; i += 16) {
        f16v x = load16<BF16>(mixed, token * values() + first + i);
        squares = fused(x, x, squares);
      }
      const f16v scale = splat(1.0f / sqrtf(sum16(squares) / sizes.value_dim + eps));
      for (int i = 0; i < sizes.value_dim; i += 16) {
        const int64_t at = token * values() + first + i;
        f16v x = rounded<BF16>(rounded<BF16>(load16<BF16>(mixed, at) * scale) * load_as<f16v>(weights.norm + i));
        store16<BF16>(mixed, at, x * silu(load16<BF16>(gate, first + i)));
      }
    }
  }

  // Of a row: the last inputs of the convolution behind what is kept and what is sure, and the inputs behind.
  void keep_inputs(int row) const {
    for (int kept = step.kept_starts[row]; kept < step.kept_starts[row + 1]; ++kept)
      keep_window(row, step.kept_after[kept], conv(step.kept_slots[kept]));
    keep_window(row, sure(row), conv(step.slots[row]));
    for (int at = sure(row); at < work_of(row); ++at) {
      char* to = pending(row, at - sure(row));
      memcpy(to, channels(row, at), width() * kBytes);
      memcpy(to + width() * kBytes, numbers(row, at), 2 * sizes.num_heads * kBytes);
    }
  }

  // Ascending: what is read of the row's own window is not written yet.
  void keep_window(int row, int end, char* to) const {
    for (int t = 0; t < sizes.taps - 1; ++t)
      memmove(to + t * width() * kBytes, channels(row, end - (sizes.taps - 1) + t), width() * kBytes);
  }

  int row_of(int work) const {
    return (int)(std::upper_bound(step.work_starts, step.work_starts + step.num_rows + 1, work) - step.work_starts) - 1;
  }

  void run() const {
    const int blocks = (sizes.value_dim + kBlock - 1) / kBlock, tasks = step.num_rows * sizes.num_heads * blocks;
    const int num_tokens = step.query_starts[step.num_rows];
#pragma omp parallel if (step.num_work * width() > 20000)
    {
#pragma omp for schedule(static)
      for (int work = 0; work < step.num_work; ++work) {
        const int row = row_of(work), at = work - step.work_starts[row];
        activate(row, at);
        open_gates(row, at);
      }
#pragma omp for schedule(guided)
      for (int task = 0; task < tasks; ++task) {
        const int row = task / blocks / sizes.num_heads, head = task / blocks % sizes.num_heads;
        const int column = task % blocks * kBlock;
        if (column + kBlock <= sizes.value_dim)
          recur<kBlock / 16>(row, head, column);
        else
          recur<1>(row, head, column);
      }
#pragma omp for schedule(static)
      for (int token = 0; token < num_tokens; ++token) norm_and_gate(token);
#pragma omp for schedule(static)
      for (int row = 0; row < step.num_rows; ++row) keep_inputs(row);
    }
  }
};

}  // namespace
}  // namespace mm

extern "C" void mm_delta_mix(const mm_delta_sizes* sizes, const mm_delta* weights, const mm_state_step* step,
                             int32_t layer, const void* projected, int32_t dtype, float eps, void* mixed) {
  const char* from = (const char*)projected;
  if (dtype == MM_BF16)
    mm::Mixer<true>{*sizes, *weights, *step, layer, from, eps, (char*)mixed}.run();
  else
    mm::Mixer<false>{*sizes, *weights, *step, layer, from, eps, (char*)mixed}.run();
}
