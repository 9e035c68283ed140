// Paged attention: storing k and v, and dividing a step's queries among threads.
#include "attention/attention.h"

#include <cstring>
#include <vector>

#include "attention/job.h"
#include "common/scratch.h"
#include "common/threads.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // with fewer multiply-adds, a single thread is faster
constexpr int kFewQueries = 16;  // rows with drafts are computed without tiles if they have at most this many queries
constexpr int kTaskQueries = 1024;  // maximum queries per task, over all heads that share a KV head

int queries_of(const mm_attention_step& step, int row) { return step.query_starts[row + 1] - step.query_starts[row]; }

// Returns whether decode.cpp computes the row. decode.cpp reads each KV block once for all heads and queries. The other
// rows are computed in tiles.
bool decodes(const mm_attention_step& step, int row) {
  const int queries = queries_of(step, row);
  const bool drafts = step.num_drafts && step.num_drafts[row] == queries - 1 && queries <= kFewQueries;
  return (queries == 1 || drafts) && !step.tiles_only;
}

// Returns the step's number of multiply-adds. Stops counting at kSmall.
int64_t work_of(const AttentionCall& call) {
  const mm_attention_step& step = *call.step;
  int64_t work = 0;
  for (int row = 0; row < step.num_rows && work < kSmall; row++) {
    const int keys = step.kv_lens[row] - call.rules.first_key(call.first_position(row));
    work += 2LL * queries_of(step, row) * keys * step.num_heads * step.head_dim;
  }
  return work;
}

// Adds tasks for prompt chunks. A task has a KV head and at most kTaskQueries queries, so its sums stay in the cache.
void plan_prefill(const mm_attention_step& step, int threads, std::vector<AttentionTask>& tasks) {
  int rows = 0;
  for (int row = 0; row < step.num_rows; row++) rows += !decodes(step, row);
  const int group = step.num_heads / step.num_kv_heads, most = group < kTaskQueries ? kTaskQueries / group : 1;
  const int parts = rows && rows * step.num_kv_heads < 2 * threads ? 2 * threads : 1;
  for (int row = 0; row < step.num_rows; row++) {
    if (decodes(step, row)) continue;
    const int queries = queries_of(step, row);
    int chunk = (int)round_up((queries + parts - 1) / parts, 16);
    chunk = chunk < most ? chunk : most;
    for (int head = 0; head < step.num_kv_heads; head++)
      for (int query = 0; query < queries; query += chunk)
        tasks.push_back({row, query, query + chunk < queries ? query + chunk : queries, head, head + 1});
  }
}

// Adds tasks for decoding rows. With enough rows, a task is a whole row, so its KV is read in address order.
void plan_decode(const mm_attention_step& step, int threads, std::vector<AttentionTask>& tasks) {
  const int heads = step.num_kv_heads, rows = step.num_rows;
  const int parts = rows >= 4 * threads ? 1 : threads < heads ? threads : heads;
  for (int row = 0; row < rows; row++)
    for (int part = 0; part < parts && decodes(step, row); part++)
      tasks.push_back({row, 0, queries_of(step, row), heads * part / parts, heads * (part + 1) / parts});
}

int64_t scratch_bytes(const AttentionCall& call, const std::vector<AttentionTask>& tasks) {
  const mm_attention_step& step = *call.step;
  int few = 0, many = 0;  // maximum number of queries in a task
  for (const AttentionTask& task : tasks) {
    int &most = decodes(step, task.row) ? few : many, queries = task.query1 - task.query0;
    most = queries > most ? queries : most;
  }
  const int64_t decode = few ? decode_scratch_bytes(call, few) : 0;
  const int64_t prefill = many ? prefill_scratch_bytes(call, many) : 0;
  return decode > prefill ? decode : prefill;
}

int run(const AttentionCall& call) {
  const mm_attention_step& step = *call.step;
  const int threads = work_of(call) < kSmall ? 1 : most_threads();
  static thread_local std::vector<AttentionTask> kept;
  std::vector<AttentionTask>& tasks = kept;
  tasks.clear();
  plan_prefill(step, threads, tasks);
  plan_decode(step, threads, tasks);
  const int64_t bytes = scratch_bytes(call, tasks);
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
  {
    char* scratch = scratch_of_thread(bytes);
    failed = scratch == nullptr;
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < tasks.size(); i++) {
      if (failed) continue;
      (decodes(step, tasks[i].row) ? attention_decode : attention_prefill)(call, tasks[i], scratch);
    }
  }
  return failed;
}

void append(const mm_attention_step& step, char* kv, const char* k, int64_t k_stride, const char* v, int64_t v_stride) {
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

void mm_attention_append(const mm_attention_step* step, void* kv_layer, const void* k, int64_t k_stride, const void* v,
                         int64_t v_stride) {
  mm::append(*step, (char*)kv_layer, (const char*)k, k_stride, (const char*)v, v_stride);
}

int32_t mm_attention_run(const mm_attention_step* step, const void* kv_layer, const void* q, int64_t q_stride,
                         void* out, int64_t out_stride) {
  return mm_attention_run_layer(step, nullptr, nullptr, kv_layer, q, q_stride, out, out_stride);
}

int32_t mm_attention_run_layer(const mm_attention_step* step, const mm_attention_layer* layer, const float* sinks,
                               const void* kv_layer, const void* q, int64_t q_stride, void* out, int64_t out_stride) {
  const mm_attention_layer plain = {};
  const mm::AttentionRules rules(*step, layer ? *layer : plain, sinks);
  return mm::run({step, rules, kv_layer, q, q_stride, out, out_stride});
}

}  // extern "C"
