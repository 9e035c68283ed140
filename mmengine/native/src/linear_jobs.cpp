// Several calls of linear layers in one pass of the threads.
#include <cstring>

#include "linear_job.h"
#include "scratch.h"
#include "threads.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // multiply-adds below which a second thread costs more than it gives
constexpr int kReading = 4;         // rows that take as long as the weights of a panel to be read

int64_t rows_bytes(const LinearJob& job) {
  const int64_t bytes = job.bf16() ? linear_scratch_bytes(job) : (int64_t)job.m * job.linear->k * 4;
  return ceil_div(bytes, 64) * 64;
}

int64_t thread_bytes(const LinearJob* jobs, int count) {
  int64_t most = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t bytes = jobs[i].bf16() ? linear_thread_bytes(jobs[i]) : 0;
    if (bytes > most) most = bytes;
  }
  return most;
}

void prepare(const LinearJob& job, char* scratch, int row0, int row1) {
  if (job.bf16()) return linear_prepare(job, scratch, row0, row1);
  const int64_t bytes = (int64_t)job.linear->k * 4;
  for (int row = row0; row < row1; ++row) memcpy(scratch + row * bytes, job.row(row), bytes);
}

void multiply(LinearJob job, char* scratch, const Share& share) {
  if (job.bf16()) return linear_run_bf16(job, scratch, share);
  job.x = scratch, job.x_stride = job.linear->k, job.gathered = nullptr;
  linear_run_fp32(job, share);
}

// What a thread does of things that stand in a row, `each` of them weighing the same.
struct Part {
  int64_t begin, end, at = 0;

  Part(int64_t all, int thread, int threads) : begin(all * thread / threads), end(all * (thread + 1) / threads) {}

  // Of the next `count` things: [first, last).
  void take(int64_t count, int64_t each, int& first, int& last) {
    first = place(begin, count, each), last = place(end, count, each);
    at += count * each;
  }

 private:
  int place(int64_t edge, int64_t count, int64_t each) const {
    const int64_t found = edge <= at ? 0 : ceil_div(edge - at, each);
    return (int)(found < count ? found : count);
  }
};

int64_t panel_weight(const LinearJob& job) { return (int64_t)(job.m + kReading) * job.linear->k; }

void run_thread(const LinearJob* jobs, int count, char* scratch, char* room, int thread, int threads) {
  int64_t rows = 0, weight = 0;
  for (int i = 0; i < count; ++i) {
    rows += jobs[i].m;
    weight += jobs[i].panels() * panel_weight(jobs[i]);
  }
  Part mine(rows, thread, threads);
  char* to = scratch;
  for (int i = 0, first, last; i < count; to += rows_bytes(jobs[i++])) {
    mine.take(jobs[i].m, 1, first, last);
    if (first < last) prepare(jobs[i], to, first, last);
  }
#pragma omp barrier
  mine = Part(weight, thread, threads);
  to = scratch;
  for (int i = 0, first, last; i < count; to += rows_bytes(jobs[i++])) {
    mine.take(jobs[i].panels(), panel_weight(jobs[i]), first, last);
    if (first < last) multiply(jobs[i], to, {0, jobs[i].m, first, last, room});
  }
}

}  // namespace

bool linear_run_jobs(const LinearJob* jobs, int count) {
  int64_t products = 0, bytes = 0;
  for (int i = 0; i < count; ++i) {
    products += (int64_t)jobs[i].m * jobs[i].linear->n * jobs[i].linear->k;
    bytes += rows_bytes(jobs[i]);
  }
  const int64_t room = thread_bytes(jobs, count);
  char* scratch = scratch_of_thread(bytes + most_threads() * room);
  if (!scratch) return false;
#pragma omp parallel if (products >= kSmall)
  run_thread(jobs, count, scratch, scratch + bytes + this_thread() * room, this_thread(), num_threads());
  return true;
}

}  // namespace mm
