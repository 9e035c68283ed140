// Runs several calls of linear layers in one parallel region.
#include <atomic>
#include <cstring>

#include "common/scratch.h"
#include "common/threads.h"
#include "linear/job.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // multiply-adds below which a second thread costs more than it saves
constexpr int kReading = 4;         // number of rows whose products take as long as reading a panel's weights

int64_t rows_bytes(const LinearJob& job) {
  const int64_t bytes = job.prepares() ? linear_scratch_bytes(job) : (int64_t)job.m * job.linear->k * 4;
  return ceil_div(bytes, 64) * 64;
}

int64_t thread_bytes(const LinearJob* jobs, int count) {
  int64_t most = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t bytes = jobs[i].prepares() ? linear_thread_bytes(jobs[i]) : 0;
    if (bytes > most) most = bytes;
  }
  return most;
}

void prepare(const LinearJob& job, char* scratch, int row0, int row1) {
  if (job.prepares()) return linear_prepare(job, scratch, row0, row1);
  const int64_t bytes = (int64_t)job.linear->k * 4;
  for (int row = row0; row < row1; ++row) memcpy(scratch + row * bytes, job.row(row), bytes);
}

void multiply(LinearJob job, char* scratch, const Share& share) {
  if (job.prepares()) return linear_run_bf16(job, scratch, share);
  job.x = scratch, job.x_stride = job.linear->k, job.gathered = nullptr;
  linear_run_fp32(job, share);
}

// One of several equal parts of a sequence of weighted items.
struct Part {
  int64_t begin, end, at = 0;

  Part(int64_t all, int part, int parts) : begin(all * part / parts), end(all * (part + 1) / parts) {}

  // Sets [first, last) to the items in this part, among the next `count` items. `each`: the weight of an item.
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

// Return how many pairs of panels a job has, and a pair's weight. If panels are stored singly, each panel counts as a
// pair.
int64_t pairs(const LinearJob& job) { return ceil_div(job.panels(), alternating(*job.linear)); }
int64_t pair_weight(const LinearJob& job) {
  return (int64_t)alternating(*job.linear) * (job.m + kReading) * job.linear->k;
}

// Multiplies the rows of all jobs with the panels that are in `part`.
void run_part(const LinearJob* jobs, int count, char* scratch, char* room, Part part) {
  for (int i = 0, first, last; i < count; scratch += rows_bytes(jobs[i++])) {
    const int panels = jobs[i].panels(), pair = alternating(*jobs[i].linear);
    part.take(pairs(jobs[i]), pair_weight(jobs[i]), first, last);
    first *= pair, last = last * pair < panels ? last * pair : panels;
    if (first < last) multiply(jobs[i], scratch, {0, jobs[i].m, first, last, room});
  }
}

void run_thread(const LinearJob* jobs, int count, char* scratch, char* room, int thread, int threads,
                std::atomic<int>& next) {
  int64_t rows = 0, weight = 0;
  for (int i = 0; i < count; ++i) {
    rows += jobs[i].m;
    weight += pairs(jobs[i]) * pair_weight(jobs[i]);
  }
  Part mine(rows, thread, threads);
  char* to = scratch;
  for (int i = 0, first, last; i < count; to += rows_bytes(jobs[i++])) {
    mine.take(jobs[i].m, 1, first, last);
    if (first < last) prepare(jobs[i], to, first, last);
  }
#pragma omp barrier
  const int parts = threads == 1 ? 1 : threads * kPieces;
  for (int part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;)
    run_part(jobs, count, scratch, room, Part(weight, part, parts));
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
  std::atomic<int> next{0};
#pragma omp parallel if (products >= kSmall)
  run_thread(jobs, count, scratch, scratch + bytes + this_thread() * room, this_thread(), num_threads(), next);
  return true;
}

}  // namespace mm
