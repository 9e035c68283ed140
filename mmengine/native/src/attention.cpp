// Paged attention: storing k and v, and how a step's queries are shared among threads.
#include "attention.h"

#include <cstdlib>
#include <cstring>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "attention_job.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // multiply-adds below which a second thread costs more than it gives

int max_threads() {
#if defined(_OPENMP)
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

// Multiply-adds of the step, or kSmall where they are more.
int64_t work_of(const mm_attention_step& step) {
  int64_t work = 0;
  for (int row = 0; row < step.num_rows && work < kSmall; row++)
    work += 2LL * (step.query_starts[row + 1] - step.query_starts[row]) * step.kv_lens[row] * step.num_heads *
            step.head_dim;
  return work;
}

// Rows are whole tasks while there are enough of them, so that each is read in address order.
void plan(const AttentionCall& call, int threads, std::vector<AttentionTask>& tasks) {
  const mm_attention_step& step = *call.step;
  const int heads = step.num_kv_heads;
  int parts = step.num_rows >= 4 * threads ? 1 : threads < heads ? threads : heads;
  for (int row = 0; row < step.num_rows; row++) {
    int queries = step.query_starts[row + 1] - step.query_starts[row];
    for (int part = 0; part < parts; part++)
      tasks.push_back({row, 0, queries, heads * part / parts, heads * (part + 1) / parts});
  }
}

// Memory of the calling thread that only grows. NULL where there is none.
char* scratch_of_thread(int64_t bytes) {
  struct Buffer {
    char* data = nullptr;
    int64_t size = 0;
    ~Buffer() { free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    free(buffer.data);
    buffer.size = round_up(bytes, 1 << 16);
    buffer.data = (char*)aligned_alloc(64, buffer.size);
    if (!buffer.data) buffer.size = 0;
  }
  return buffer.data;
}

int run(const AttentionCall& call) {
  const int threads = work_of(*call.step) < kSmall ? 1 : max_threads();
  static thread_local std::vector<AttentionTask> kept;
  std::vector<AttentionTask>& tasks = kept;
  tasks.clear();
  plan(call, threads, tasks);
  const int64_t bytes = decode_scratch_bytes(*call.step);
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
    char* scratch = scratch_of_thread(bytes);
    failed = scratch == nullptr;
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < tasks.size(); i++)
      if (!failed) attention_decode(call, tasks[i], scratch);
  }
  return failed;
}

void append(const mm_attention_step& step, char* kv, const char* k, int64_t k_stride, const char* v,
            int64_t v_stride) {
  const int64_t size = step.dtype == 0 ? 4 : 2, token = (int64_t)step.num_kv_heads * step.head_dim * size;
  const int64_t inside = step.block_size - 1;
  for (int t = 0; t < step.num_tokens; t++) {
    const int64_t slot = step.slots[t], block = slot & ~inside;
    char* to = kv + (2 * block + (slot & inside)) * token;
    memcpy(to, k + t * k_stride * size, token);
    memcpy(to + step.block_size * token, v + t * v_stride * size, token);
  }
}

}  // namespace
}  // namespace mm

extern "C" {

void mm_attention_append(const mm_attention_step* step, void* kv_layer, const void* k, int64_t k_stride,
                         const void* v, int64_t v_stride) {
  mm::append(*step, (char*)kv_layer, (const char*)k, k_stride, (const char*)v, v_stride);
}

int32_t mm_attention_run(const mm_attention_step* step, const void* kv_layer, const void* q, int64_t q_stride,
                         void* out, int64_t out_stride) {
  return mm::run({step, kv_layer, q, q_stride, out, out_stride});
}

}  // extern "C"
