// The gated delta net: convolution, gates, recurrence, output norm, and the inputs stored for later steps. S is the
// recurrent state [key_dim, value_dim] of a head.
#include "layers/delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/row_vec.h"

namespace mm {
namespace {

constexpr int kBlock = 32;  // columns of S that are stored together; with 128 rows they fill half a first-level cache

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
  char* conv(int slot) const { return (char*)step.conv + (slot * step.conv_slot + layer * step.conv_layer) * kBytes; }
  char* pending(int row, int place) const {
    return (char*)step.pending +
           (step.rows[row] * step.pending_row + layer * step.pending_layer + place * input_width()) * kBytes;
  }
  // Returns the address of S's column `column`, a multiple of kBlock.
  float* state(int slot, int head, int column) const {
    return step.recurrent + slot * step.recurrent_slot + layer * step.recurrent_layer +
           ((int64_t)head * sizes.value_dim + column) * sizes.key_dim;
  }
  // Addresses for one head and one token. k follows q, and beta follows the decay in `gates`.
  float* q(int key_head, int64_t work) const {
    return step.acts + (key_head * (int64_t)step.num_work + work) * 2 * sizes.key_dim;
  }
  float* v(int head, int64_t work) const {
    return step.acts + step.num_work * 2 * keys() + (head * (int64_t)step.num_work + work) * sizes.value_dim;
  }
  float* gates(int head, int64_t work) const { return step.gates + (head * (int64_t)step.num_work + work) * 2; }

  // Returns the convolution's input for token `at` of the row's work. A negative `at` means an input before the work.
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

  static float number(const char* from, int at) { return load_part<BF16, wide>(from, at, 1)[0]; }

  // Computes q, k and v of one token.
  void activate(int row, int at) const {
    const int64_t work = step.work_starts[row] + at;
    const char* taps[MM_MAX_TAPS];
    for (int t = 0; t < sizes.taps; ++t) taps[t] = channels(row, at - (sizes.taps - 1) + t);
    const float scale = 1.0f / sqrtf((float)sizes.key_dim);
    for (int head = 0; head < sizes.num_key_heads; ++head) {
      float *to = q(head, work), *k = to + sizes.key_dim;
      convolve(taps, (int64_t)head * sizes.key_dim, sizes.key_dim, to);
      convolve(taps, keys() + (int64_t)head * sizes.key_dim, sizes.key_dim, k);
      to_unit(to, scale);
      to_unit(k, 1.0f);
    }
    for (int head = 0; head < sizes.num_heads; ++head)
      convolve(taps, 2 * keys() + (int64_t)head * sizes.value_dim, sizes.value_dim, v(head, work));
  }

  void convolve(const char* const* taps, int64_t first, int count, float* out) const {
    for (int c = 0; c < count; c += kWide) {
      wide sum = {};
      for (int t = 0; t < sizes.taps; ++t)
        sum = fused(load_part<BF16, wide>(taps[t], first + c, count - c),
                    load_part<false, wide>((const char*)(weights.conv + t * width()), first + c, count - c), sum);
      store_part<false>((char*)out, c, rounded<BF16>(silu(rounded<BF16>(sum))), count - c);
    }
  }

  void to_unit(float* x, float scale) const {
    wide squares = {};
    for (int i = 0; i < sizes.key_dim; i += kWide) {
      wide part = load_part<false, wide>((const char*)x, i, sizes.key_dim - i);
      squares = fused(part, part, squares);
    }
    const float by = 1.0f / sqrtf(sum_row(squares) + 1e-6f);
    for (int i = 0; i < sizes.key_dim; ++i) x[i] = x[i] * by * scale;
  }

  // Computes the decay and beta of one token's heads.
  void open_gates(int row, int at) const {
    const char* from = numbers(row, at);
    for (int head = 0; head < sizes.num_heads; ++head) {
      float* out = gates(head, step.work_starts[row] + at);
      const float b = number(from, head), a = number(from, sizes.num_heads + head) + weights.dt_bias[head];
      const float soft = a > 20.0f ? a : log1pf(expf(a));
      out[0] = expf(weights.decay[head] * soft);
      out[1] = rounded<BF16>(all(1.0f / (1.0f + expf(-b))))[0];
    }
  }

  // Runs the recurrence of a row for N registers of a head's columns. Certain tokens update S in place; the drafts that
  // follow update a copy.
  template <int N>
  void recur(int row, int head, int column) const {
    alignas(64) float drafted[MM_MAX_KEY_DIM * kBlock];
    const int64_t first = step.work_starts[row], bytes = (int64_t)sizes.key_dim * N * kWide * sizeof(float);
    const int before = stayed(row), last = sure(row), count = work_of(row);
    const int group = sizes.num_heads / sizes.num_key_heads;
    const float* qk = q(sizes.tiled ? head % sizes.num_key_heads : head / group, first);
    float* s = state(step.slots[row], head, column);
    int kept = step.kept_starts[row];
    wide seen[N], out[N];  // S'k and S'q
    read<N>(s, qk + sizes.key_dim, seen);
    for (int at = 0; at < count; ++at, qk += 2 * sizes.key_dim) {
      if (at == last) s = (float*)memcpy(drafted, s, bytes);
      const float *opened = gates(head, first + at), *value = v(head, first + at) + column;
      for (int n = 0; n < N; ++n) seen[n] = opened[1] * fused(all(-opened[0]), seen[n], load_wide(value + n * kWide));
      if (at + 1 < count)
        correct<N, true>(s, qk, opened[0], seen, out);
      else
        correct<N, false>(s, qk, opened[0], seen, out);
      if (at >= before) {
        const int64_t to = (step.query_starts[row] + at - before) * values() + head * sizes.value_dim + column;
        for (int n = 0; n < N; ++n) store_row<BF16>(mixed, to + n * kWide, out[n]);
      }
      for (; kept < step.kept_starts[row + 1] && step.kept_after[kept] == at + 1; ++kept)
        memcpy(state(step.kept_slots[kept], head, column), s, bytes);
    }
  }

  template <int N>
  MM_INLINE_MEMBER void read(const float* s, const float* k, wide* seen) const {
    wide sums[N] = {};
    for (int i = 0; i < sizes.key_dim; ++i)
      for (int n = 0; n < N; ++n) sums[n] = fused(load_wide(s + (i * N + n) * kWide), all(k[i]), sums[n]);
    for (int n = 0; n < N; ++n) seen[n] = sums[n];
  }

  // Processes one token in a single pass over S: updates S, computes the output, and with NEXT the next token's S'k.
  // `qk`: the token's q, followed by its k. `seen` on entry: the update of S along k, beta (v - S'k). The last token
  // prefetches the next block. Without that, a step with one token per row would wait for memory half of its time.
  template <int N, bool NEXT>
  MM_INLINE_MEMBER void correct(float* s, const float* qk, float decay, wide* seen, wide* out) const {
    wide sums[N] = {}, nexts[N] = {}, delta[N];
    for (int n = 0; n < N; ++n) delta[n] = seen[n];
    const int key_dim = sizes.key_dim;
    const float *k = qk + key_dim, *next = NEXT ? k + 2 * key_dim : k;
    for (int i = 0; i < key_dim; ++i, s += N * kWide) {
      const wide ki = all(k[i]), qi = all(qk[i]), next_i = all(next[i]);
      for (int n = 0; n < N; ++n) {
        const wide x = fused(ki, delta[n], decay * load_wide(s + n * kWide));
        store_as(s + n * kWide, x);
        sums[n] = fused(x, qi, sums[n]);
        if (NEXT)
          nexts[n] = fused(x, next_i, nexts[n]);
        else if (n % (16 / kWide) == 0)  // once per cache line
          __builtin_prefetch(s + ((int64_t)key_dim * N + n) * kWide, 1, 2);
      }
    }
    for (int n = 0; n < N; ++n) out[n] = sums[n], seen[n] = nexts[n];
  }

  // Normalises a token's heads and applies their gates.
  void norm_and_gate(int64_t token) const {
    const char* gate = projected + (token * (width() + values()) + width()) * kBytes;
    for (int head = 0; head < sizes.num_heads; ++head) {
      const int64_t first = head * sizes.value_dim;
      wide squares = {};
      for (int i = 0; i < sizes.value_dim; i += kWide) {
        wide x = load_row<BF16, wide>(mixed, token * values() + first + i);
        squares = fused(x, x, squares);
      }
      const wide scale = all(1.0f / sqrtf(sum_row(squares) / sizes.value_dim + eps));
      for (int i = 0; i < sizes.value_dim; i += kWide) {
        const int64_t at = token * values() + first + i;
        wide normed = rounded<BF16>(load_row<BF16, wide>(mixed, at) * scale);
        wide x = rounded<BF16>(normed * load_wide(weights.norm + i));
        store_row<BF16>(mixed, at, x * silu(load_row<BF16, wide>(gate, first + i)));
      }
    }
  }

  // Stores the last taps - 1 convolution inputs for each saved state, and for the row's own state, which ends with the
  // certain tokens. The drafts' inputs go to `pending`.
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

  // Copies in ascending order, so that entries of the row's own window are read before they are overwritten.
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
          recur<kBlock / kWide>(row, head, column);
        else
          recur<16 / kWide>(row, head, column);
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
