// Linear layers with bfloat16 weights or codes on CPUs without AMX: converts the rows of x and multiplies them with
// each panel.
#include "common/vec.h"
#include "linear/int8.h"
#include "linear/rows.h"

#if !defined(__AMX_BF16__)

namespace mm {
namespace {

constexpr int kMostRows = 512;  // most rows whose sums stay in a cache

// Returns the distance between rows of x in scratch. Without the extra cache line, all rows would map to the same cache
// set if k is a power of two.
int64_t row_stride(const LinearJob& job) { return (int64_t)job.steps() * kStep + 64 / (int64_t)sizeof(Scratch); }

// Returns the offset in scratch of each row's sums of x over the groups, float32 [m, groups]. They follow the rows.
int64_t group_sums_at(const LinearJob& job) { return ceil_div(job.m * row_stride(job) * sizeof(Scratch), 64) * 64; }

MM_INLINE f16v values16(const uint16_t* x) { return widen(load_as<h16v>(x)); }
MM_INLINE f16v values16(const float* x) { return load_as<f16v>(x); }
MM_INLINE float value_of(uint16_t x) { return widen(h16v{x})[0]; }
MM_INLINE float value_of(float x) { return x; }

// Writes the sum of x over each group, and returns the end of the sums. `X`: uint16_t for bfloat16, or float.
template <class X>
float* sum_groups(int64_t k, int group, const X* x, float* sums) {
  for (int64_t first = 0; first < k; first += group) {
    f16v sum = {};
    int64_t end = first + group < k ? first + group : k, t = first;
    for (; t + 16 <= end; t += 16) sum += values16(x + t);
    for (; t < end; ++t) sum[0] += value_of(x[t]);
    float whole = 0;
    for (int i = 0; i < 16; ++i) whole += sum[i];
    *sums++ = whole;
  }
  return sums;
}

template <class X>
void sum_row(const mm_linear& linear, const X* x, float* sums) {
  if (linear.form != MM_BLOCKS) {
    sum_groups(linear.k, linear.group, x, sums);
    return;
  }
  sums = sum_groups(linear.k, 32, x, sums);
  sum_groups(linear.k, 16, x, sums);
}

// Converts rows [row0, row1) of x. Layers of dtype float32 require that Scratch is float.
template <class X>
void prepare_rows(const LinearJob& job, void* scratch, int row0, int row1) {
  int64_t k = job.linear->k, padded = (int64_t)job.steps() * kStep, stride = row_stride(job);
  float* sums = (float*)((char*)scratch + group_sums_at(job));
  for (int row = row0; row < row1; ++row) {
    const X* from = (const X*)job.row(row);
    Scratch* to = (Scratch*)scratch + row * stride;
    if constexpr (sizeof(Scratch) == sizeof(X))
      memcpy(to, from, k * sizeof(X));
    else
      for (int64_t t = 0; t < k; ++t) to[t] = value_of(from[t]);
    memset(to + k, 0, (padded - k) * sizeof(Scratch));
    if (wants_sums(*job.linear)) sum_row(*job.linear, from, sums + (int64_t)row * sums_in_row(*job.linear));
    for (int64_t t = 0; t < k && job.m == 1 && is_masked(*job.linear); ++t) to[t] *= kMaskedBy[t % 4];
  }
}

// Returns how many panels, starting at `panel`, are multiplied at once.
int panels_at_once(const LinearJob& job, const Share& share, int panel) {
  const bool few = share.row1 - share.row0 <= kPairRows;
  return few && alternating(*job.linear) == 2 && panel % 2 == 0 && panel + 1 < share.panel1 ? 2 : 1;
}

void multiply_panels(int panels, const LinearJob& job, const Rows& rows, int panel, float* c) {
#if defined(__AVX512BF16__)
  if (job.linear->form == MM_BLOCKS)
    return run_block_panel(block_type_of(*job.linear, panel), rows, job.panel(panel), c);
#endif
  run_panels(panels, rows, job.panel(panel), c);
}

}  // namespace

int64_t linear_scratch_bytes(const LinearJob& job) {
  if (job.linear->x_form) return int8_scratch_bytes(job);
  return group_sums_at(job) + (int64_t)job.m * sums_in_row(*job.linear) * (int64_t)sizeof(float);
}

int64_t linear_thread_bytes(const LinearJob&) { return 0; }

void linear_prepare(const LinearJob& job, void* scratch, int row0, int row1) {
  if (job.linear->x_form) return int8_prepare(job, scratch, row0, row1);
  job.bf16() ? prepare_rows<uint16_t>(job, scratch, row0, row1) : prepare_rows<float>(job, scratch, row0, row1);
}

void linear_run_bf16(const LinearJob& job, const void* scratch, const Share& share) {
  if (job.linear->x_form) return int8_run(job, scratch, share);
  alignas(64) float c[kMostRows * kPanel];
  const float* sums = (const float*)((const char*)scratch + group_sums_at(job));
  const int groups = job.linear->form == MM_BLOCKS ? sums_in_row(*job.linear) : job.groups();
  const Rows every = {*job.linear, (const Scratch*)scratch, row_stride(job), sums, job.m, groups, job.m == 1};
  for (int panel = share.panel0, panels; panel < share.panel1; panel += panels) {
    panels = panels_at_once(job, share, panel);
    for (int row = share.row0; row < share.row1; row += kMostRows) {
      const int count = share.row1 - row < kMostRows ? share.row1 - row : kMostRows;
      multiply_panels(panels, job, every.some(row, count), panel, c);
      for (int i = 0; i < panels; ++i) linear_store(job, c + i * count * kPanel, kPanel, row, count, panel + i);
    }
  }
}

}  // namespace mm

#endif
