// Runs a linear layer: divides rows and panels among threads.
#include "linear/linear.h"

#include <atomic>

#include "common/fetch.h"
#include "common/scratch.h"
#include "common/threads.h"
#include "linear/job.h"
#include "linear/rows.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // multiply-adds below which a second thread costs more than it saves
constexpr int kChunk = 1024;        // rows that are copied to scratch at a time

int64_t thread_bytes(const LinearJob& job) { return job.prepares() ? linear_thread_bytes(job) : 0; }

// Returns a thread's share if there are fewer panels than threads: one panel, and some of the blocks of rows.
Share share_of(const LinearJob& job, char* room, int thread, int threads) {
  int across = job.panels(), down = threads / across;
  if (thread >= across * down) return {};
  int blocks = (int)ceil_div(job.m, 32), i = thread % across, j = thread / across;
  int row0 = (int)((int64_t)blocks * j / down) * 32, row1 = (int)((int64_t)blocks * (j + 1) / down) * 32;
  return {row0, row1 < job.m ? row1 : job.m, i, i + 1, room};
}

void run_share(const LinearJob& job, const char* scratch, const Share& share) {
  if (share.row0 >= share.row1 || share.panel0 >= share.panel1) return;
  if (job.prepares())
    linear_run_bf16(job, scratch, share);
  else
    linear_run_fp32(job, share);
}

// Returns how many neighbouring panels a thread takes each time it is free. Panels are not divided evenly beforehand,
// because a core may have other work or be shared with another virtual machine. The count is even, for panels that are
// stored in pairs.
int panels_at_once(const LinearJob& job, int threads) {
  int count = (int)ceil_div(job.panels(), threads * kPieces);
  return threads == 1 ? job.panels() : count + count % 2;
}

// `scratch`: `rows_bytes` for the rows of x, then thread_bytes for each thread. `next`: the first panel that no thread
// has taken.
void run_thread(const LinearJob& job, char* scratch, int64_t rows_bytes, int thread, int threads,
                std::atomic<int>& next) {
  if (job.prepares()) {
    int blocks = (int)ceil_div(job.m, 16);
    int row0 = (int)((int64_t)blocks * thread / threads) * 16;
    int row1 = (int)((int64_t)blocks * (thread + 1) / threads) * 16;
    linear_prepare(job, scratch, row0, row1 < job.m ? row1 : job.m);
#pragma omp barrier
  }
  char* room = scratch + rows_bytes + thread * thread_bytes(job);
  const int panels = job.panels(), count = panels_at_once(job, threads);
  if (panels < threads) return run_share(job, scratch, share_of(job, room, thread, threads));
  for (int panel; (panel = next.fetch_add(count, std::memory_order_relaxed)) < panels;)
    run_share(job, scratch, {0, job.m, panel, panel + count < panels ? panel + count : panels, room});
}

bool run_chunk(const LinearJob& job) {
  const int64_t rows_bytes = job.prepares() ? ceil_div(linear_scratch_bytes(job), 64) * 64 : 0;
  const int64_t bytes = rows_bytes + most_threads() * thread_bytes(job);
  char* scratch = bytes ? scratch_of_thread(bytes) : nullptr;
  if (bytes && !scratch) return false;
  std::atomic<int> next{0};
#pragma omp parallel if ((int64_t)job.m * job.linear->n * job.linear->k >= kSmall)
  run_thread(job, scratch, rows_bytes, this_thread(), num_threads(), next);
  return true;
}

int32_t run(LinearJob job) {
  int m = job.m, x_size = job.bf16() ? 2 : 4, y_size = job.bf16() && !job.y_fp32 ? 2 : 4;
  for (int row = 0; row < m; row += kChunk) {
    LinearJob chunk = job;
    chunk.m = m - row < kChunk ? m - row : kChunk;
    chunk.x = (const char*)job.x + row * job.x_stride * x_size;
    chunk.y = (char*)job.y + row * job.y_stride * y_size;
    if (job.added) chunk.added = job.added + (int64_t)row * job.linear->n;
    if (job.residual) chunk.residual = (const char*)job.residual + row * job.y_stride * y_size;
    if (!run_chunk(chunk)) return 1;
  }
  return 0;
}

}  // namespace
}  // namespace mm

extern "C" {

int32_t mm_linear_run(const mm_linear* linear, const void* x, int64_t x_stride, int32_t m, void* y, int64_t y_stride,
                      int32_t y_fp32, const void* residual) {
  return mm::run({linear, x, x_stride, m, y, y_stride, residual, y_fp32 != 0, false});
}

int32_t mm_linear_gate_up(const mm_linear* linear, const void* x, int64_t x_stride, int32_t m, void* y,
                          int64_t y_stride, const float* added) {
  return mm::run({linear, x, x_stride, m, y, y_stride, nullptr, false, true, nullptr, added});
}

int32_t mm_linear_blocks(int32_t dtype) {
#if defined(__AVX512BF16__)
  (void)dtype;
  return 1;
#else
  return dtype == MM_FP32;
#endif
}

int32_t mm_linear_prefers_codes(int32_t type) {
#if defined(__AVX512F__)
  return type == mm::kQ4_0 || type == mm::kQ4_1 || type == mm::kQ8_0;
#else
  (void)type;
  return 0;
#endif
}

int32_t mm_linear_int16(void) {
#if defined(__AVX512VNNI__)
  return 1;
#else
  return 0;
#endif
}

// Measured on an Intel CPU only. With AMX, bfloat16 tiles are faster for 16 rows and more.
int32_t mm_linear_prefers_int16(void) {
#if defined(__AMX_BF16__)
  return 0;
#else
  return mm_linear_int16() && !mm::kIsAmd;
#endif
}

int32_t mm_linear_codes_fp32(void) { return sizeof(mm::Scratch) == sizeof(float); }

}  // extern "C"
