// Low-rank additions: x a^T of all groups first, then what b makes of it.
#include "lora.h"

#include <vector>

#include "linear.h"
#include "row_vec.h"
#include "scratch.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // multiply-adds below which a second thread costs more than it gives
constexpr int kLanes = 16;
constexpr int kRows = 4;          // that share what is read of a and b
constexpr int kSums = 4;          // into which a row's sum over k is split, whatever the number of rows
constexpr int kRowsOfTask = 64;   // of x a^T
constexpr int kPanelsOfTask = 32;  // of 16 columns of b^T
constexpr int kAhead = 8192;      // bytes that are asked of memory before they are needed

inline void fetch_ahead(const char* at) { __builtin_prefetch(at + kAhead, 0, 3); }

// A part for a group's rows. `sums`: of each row, rank16 of them.
struct Added {
  const mm_lora* lora;
  const mm_lora_part* part;
  const int32_t* rows;
  int first, count;  // of the rows, among all that are named
  float* sums;

  int rank16() const { return (part->rank + kLanes - 1) / kLanes * kLanes; }
  int panels() const { return (part->n + kLanes - 1) / kLanes; }
};

struct Task {
  const Added* of;
  int begin, end;  // rows, or panels
};

template <bool BF16>
void widen_row(const char* from, int k, float* to) {
  int t = 0;
  for (; t + kLanes <= k; t += kLanes) store_as(to + t, load_row<BF16>(from, t));
  if (t < k) store_part<false>((char*)to, t, load_part<BF16>(from, t, k - t), k - t);
}

// Sums of M rows of x by 16 rows of a.
template <bool BF16, int M>
void shrink_block(const char* a, const float* const* x, int k, float scale, float* const* to) {
  f16v sums[M][kSums] = {};
  int t = 0;
  for (; t + kSums <= k; t += kSums) {
    const char* step = a + (int64_t)t * kLanes * (BF16 ? 2 : 4);
    for (int line = 0; line < kSums * kLanes * (BF16 ? 2 : 4); line += 64) fetch_ahead(step + line);
    for (int i = 0; i < kSums; ++i) {
      const f16v v = load_row<BF16>(step, (int64_t)i * kLanes);
      for (int m = 0; m < M; ++m) sums[m][i] = fused(v, splat(x[m][t + i]), sums[m][i]);
    }
  }
  for (int i = 0; t < k; ++t, ++i) {
    const f16v v = load_row<BF16>(a, (int64_t)t * kLanes);
    for (int m = 0; m < M; ++m) sums[m][i] = fused(v, splat(x[m][t]), sums[m][i]);
  }
  for (int m = 0; m < M; ++m)
    store_as(to[m], ((sums[m][0] + sums[m][1]) + (sums[m][2] + sums[m][3])) * scale);
}

template <bool BF16, int M>
void shrink_rows(const Added& added, const float* x, int64_t x_stride, int row) {
  const int k = added.lora->k, rank16 = added.rank16();
  const float* from[M];
  for (int m = 0; m < M; ++m) from[m] = x + (added.first + row + m) * x_stride;
  for (int block = 0; block < rank16; block += kLanes) {
    float* to[M];
    for (int m = 0; m < M; ++m) to[m] = added.sums + (int64_t)(row + m) * rank16 + block;
    const int64_t at = (int64_t)block * k * (BF16 ? 2 : 4);
    shrink_block<BF16, M>((const char*)added.part->a + at, from, k, added.part->scale, to);
  }
}

template <bool BF16>
void shrink(const Task& task, const float* x, int64_t x_stride) {
  int row = task.begin;
  for (; row + kRows <= task.end; row += kRows) shrink_rows<BF16, kRows>(*task.of, x, x_stride, row);
  for (; row < task.end; ++row) shrink_rows<BF16, 1>(*task.of, x, x_stride, row);
}

// Adds P panels of 16 columns to M rows.
template <bool BF16, bool YBF16, int M, int P>
void expand_block(const Added& added, int row, int panel, char* y, int64_t y_stride) {
  const mm_lora_part& part = *added.part;
  f16v sums[M][P] = {};
  const float* from[M];
  for (int m = 0; m < M; ++m) from[m] = added.sums + (int64_t)(row + m) * added.rank16();
  for (int r = 0; r < part.rank; ++r)
    for (int p = 0; p < P; ++p) {
      const int64_t at = ((int64_t)(panel + p) * part.rank + r) * kLanes;
      fetch_ahead((const char*)part.b + at * (BF16 ? 2 : 4));
      const f16v v = load_row<BF16>((const char*)part.b, at);
      for (int m = 0; m < M; ++m) sums[m][p] = fused(v, splat(from[m][r]), sums[m][p]);
    }
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < P; ++p) {
      const int column = (panel + p) * kLanes, rest = part.n - column;
      const int64_t at = added.rows[row + m] * y_stride + part.offset + column;
      store_part<YBF16>(y, at, load_part<YBF16>(y, at, rest) + sums[m][p], rest);
    }
}

template <bool BF16, bool YBF16, int M>
void expand_rows(const Task& task, int row, char* y, int64_t y_stride) {
  constexpr int kAtOnce = M == 1 ? 4 : 2;
  int panel = task.begin;
  for (; panel + kAtOnce <= task.end; panel += kAtOnce)
    expand_block<BF16, YBF16, M, kAtOnce>(*task.of, row, panel, y, y_stride);
  for (; panel < task.end; ++panel) expand_block<BF16, YBF16, M, 1>(*task.of, row, panel, y, y_stride);
}

template <bool BF16, bool YBF16>
void expand(const Task& task, char* y, int64_t y_stride) {
  int row = 0;
  for (; row + kRows <= task.of->count; row += kRows)
    expand_rows<BF16, YBF16, kRows>(task, row, y, y_stride);
  for (; row < task.of->count; ++row) expand_rows<BF16, YBF16, 1>(task, row, y, y_stride);
}

void cut(const Added& added, int count, int size, std::vector<Task>& tasks) {
  for (int begin = 0; begin < count; begin += size)
    tasks.push_back({&added, begin, begin + size < count ? begin + size : count});
}

// Everything of one linear layer that is added in a step.
struct Call {
  std::vector<Added> added;
  int64_t num_sums = 0, work = 0;
  int k = 0, dtype = MM_FP32, num_rows;

  Call(const mm_lora_step* step, int linear) : num_rows(step->starts[step->num_groups]) {
    for (int group = 0; group < step->num_groups; ++group) {
      const mm_lora* lora = step->of[(int64_t)group * step->num_linears + linear];
      const int first = step->starts[group], count = step->starts[group + 1] - first;
      if (!lora || !count) continue;
      k = lora->k, dtype = lora->dtype;
      for (int i = 0; i < lora->num_parts; ++i) {
        const mm_lora_part& part = lora->parts[i];
        added.push_back({lora, &part, step->rows + first, first, count, nullptr});
        num_sums += (int64_t)count * added.back().rank16();
        work += (int64_t)count * part.rank * (k + part.n);
      }
    }
  }

  int64_t room() const { return (num_sums + (int64_t)num_rows * k) * 4; }
};

template <bool BF16, bool YBF16>
void run(Call& call, const int32_t* rows, const char* x, int64_t x_stride, char* y, int64_t y_stride, float* room) {
  float* wide = room + call.num_sums;
  std::vector<Task> shrinks, expands;
  for (Added& each : call.added) {
    each.sums = room;
    room += (int64_t)each.count * each.rank16();
  }
  for (const Added& each : call.added) {
    cut(each, each.count, kRowsOfTask, shrinks);
    cut(each, each.panels(), kPanelsOfTask, expands);
  }
  const int num_shrinks = (int)shrinks.size(), num_expands = (int)expands.size();
#pragma omp parallel if (call.work >= kSmall)
  {
#pragma omp for schedule(static)
    for (int i = 0; i < call.num_rows; ++i)
      widen_row<BF16>(x + rows[i] * x_stride * (BF16 ? 2 : 4), call.k, wide + (int64_t)i * call.k);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < num_shrinks; ++i) shrink<BF16>(shrinks[i], wide, call.k);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < num_expands; ++i) expand<BF16, YBF16>(expands[i], y, y_stride);
  }
}

void add(Call& call, const int32_t* rows, const void* x, int64_t x_stride, void* y, int64_t y_stride, int y_dtype,
         float* room) {
  const auto chosen = call.dtype == MM_FP32 ? run<false, false> : y_dtype == MM_BF16 ? run<true, true> : run<true, false>;
  chosen(call, rows, (const char*)x, x_stride, (char*)y, y_stride, room);
}

}  // namespace
}  // namespace mm

extern "C" {

int32_t mm_lora_touches(const mm_lora_step* step, int32_t linear) {
  for (int group = 0; group < step->num_groups; ++group)
    if (step->of[(int64_t)group * step->num_linears + linear]) return 1;
  return 0;
}

int32_t mm_lora_add(const mm_lora_step* step, int32_t linear, const void* x, int64_t x_stride, void* y,
                    int64_t y_stride, int32_t y_dtype) {
  mm::Call call(step, linear);
  if (call.added.empty()) return 0;
  float* room = (float*)mm::scratch_of_thread(call.room());
  if (!room) return 1;
  mm::add(call, step->rows, x, x_stride, y, y_stride, y_dtype, room);
  return 0;
}

const float* mm_lora_sums(const mm_lora_step* step, int32_t linear, const void* x, int64_t x_stride, int32_t m,
                          int32_t n) {
  mm::Call call(step, linear);
  float* sums = (float*)mm::scratch_of_thread((int64_t)m * n * 4 + call.room());
  if (!sums) return nullptr;
  memset(sums, 0, (size_t)m * n * 4);
  mm::add(call, step->rows, x, x_stride, sums, n, MM_FP32, sums + (int64_t)m * n);
  return sums;
}

}  // extern "C"
