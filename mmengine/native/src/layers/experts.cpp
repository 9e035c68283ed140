#include "layers/experts.h"

#include <cmath>
#include <new>
#include <vector>

#include "common/row_vec.h"
#include "common/scratch.h"
#include "layers/routing.h"
#include "linear/job.h"

namespace mm {
namespace {

constexpr int kMostPairs = 4096;    // most (token, expert) pairs computed at a time; bounds the scratch memory
constexpr int64_t kSmall = 100000;  // a loop over fewer values runs in one thread

// The (token, expert) pairs of a chunk of tokens, in two orders: by token, and by expert.
struct Pairs {
  std::vector<float> logits, gates;  // [m, count]: the router's output; [m]: the shared expert's gates
  std::vector<int32_t> chosen;       // [m, top_k]
  std::vector<float> chances;        // [m, top_k]
  std::vector<int32_t> places;       // [m, top_k]: each pair's position when sorted by expert
  std::vector<int32_t> tokens;       // [m * top_k], sorted by expert
  std::vector<int32_t> begins;       // [count + 1]: position of each expert's first pair

  void sort(int count, int m, int top_k) {
    begins.assign(count + 1, 0);
    for (int32_t expert : chosen) ++begins[expert + 1];
    for (int i = 0; i < count; ++i) begins[i + 1] += begins[i];
    std::vector<int32_t> next(begins.begin(), begins.end() - 1);
    tokens.resize((size_t)m * top_k), places.resize((size_t)m * top_k);
    for (int i = 0; i < m * top_k; ++i) {
      places[i] = next[chosen[i]]++;
      tokens[places[i]] = i / top_k;
    }
  }
};

// A chunk of tokens. y, residual: as in mm_experts_run.
struct Call {
  const mm_experts& experts;
  const char* x;
  int64_t x_stride;
  int m;
  char* y;
  int64_t y_stride;
  const char* residual;

  bool bf16() const { return experts.router.dtype == MM_BF16; }
  int size() const { return bf16() ? 2 : 4; }
  int hidden() const { return experts.router.k; }
  bool shared() const { return experts.shared_down.n > 0; }
};

bool choose(const Call& call, Pairs& pairs) {
  const mm_experts& experts = call.experts;
  const int m = call.m, count = experts.count, top_k = experts.top_k;
  pairs.logits.resize((size_t)m * count), pairs.gates.resize(m);
  pairs.chosen.resize((size_t)m * top_k), pairs.chances.resize((size_t)m * top_k);
  if (mm_linear_run(&experts.router, call.x, call.x_stride, m, pairs.logits.data(), count, 1, nullptr)) return false;
#pragma omp parallel for schedule(static) if ((int64_t)m * count > kSmall / 8)
  for (int i = 0; i < m; ++i)
    route(experts, &pairs.logits[(size_t)i * count], &pairs.chosen[(size_t)i * top_k],
          &pairs.chances[(size_t)i * top_k]);
  pairs.sort(count, m, top_k);
  for (int i = 0; experts.hits && i < count; ++i) experts.hits[i] += pairs.begins[i + 1] - pairs.begins[i];
  if (!call.shared()) return true;
  if (mm_linear_run(&experts.shared_gate, call.x, call.x_stride, m, pairs.gates.data(), 1, 1, nullptr)) return false;
  for (float& gate : pairs.gates) {
    gate = 1.0f / (1.0f + expf(-gate));
    if (call.bf16()) gate = round_bf16(splat(gate))[0];
  }
  return true;
}

// Rows in scratch: one per pair, sorted by expert, then one per token for the shared expert.
struct Rows {
  char *wide, *found, *shared_wide, *shared_found;

  static int64_t bytes(const Call& call) {
    const int64_t pairs = (int64_t)call.m * call.experts.top_k;
    int64_t values = pairs * (call.experts.down.k + call.hidden());
    if (call.shared()) values += (int64_t)call.m * (call.experts.shared_down.k + call.hidden());
    return values * call.size();
  }

  Rows(const Call& call, char* scratch) {
    const int64_t pairs = (int64_t)call.m * call.experts.top_k, size = call.size();
    wide = scratch;
    found = wide + pairs * call.experts.down.k * size;
    shared_wide = found + pairs * call.hidden() * size;
    shared_found = shared_wide + (call.shared() ? (int64_t)call.m * call.experts.shared_down.k * size : 0);
  }
};

// Jobs for all experts: [0] for gate_up, [1] for down. linears: the layers to which the jobs point.
struct Jobs {
  std::vector<mm_linear> linears[2];
  std::vector<LinearJob> jobs[2];

  void make(const Call& call, const Pairs& pairs, const Rows& rows) {
    const mm_experts& experts = call.experts;
    for (int i = 0; i < 2; ++i) {
      linears[i].assign(experts.count, i ? experts.down : experts.gate_up);
      jobs[i].clear();
    }
    const int64_t gate_up_bytes = mm_linear_bytes(&experts.gate_up), down_bytes = mm_linear_bytes(&experts.down);
    const int64_t wide = experts.down.k, hidden = call.hidden(), size = call.size();
    for (int expert = 0; expert < experts.count; ++expert) {
      const int64_t begin = pairs.begins[expert];
      const int m = (int)(pairs.begins[expert + 1] - begin);
      if (!m) continue;
      mm_linear &gate_up = linears[0][expert], &down = linears[1][expert];
      gate_up.packed = (const char*)gate_up.packed + expert * gate_up_bytes;
      down.packed = (const char*)down.packed + expert * down_bytes;
      char *middle = rows.wide + begin * wide * size, *found = rows.found + begin * hidden * size;
      jobs[0].push_back({&gate_up, call.x, call.x_stride, m, middle, wide, nullptr, false, true, &pairs.tokens[begin]});
      jobs[1].push_back({&down, middle, wide, m, found, hidden, nullptr, false, false});
    }
    if (!call.shared()) return;
    const int64_t shared = experts.shared_down.k;
    jobs[0].push_back(
        {&experts.shared_gate_up, call.x, call.x_stride, call.m, rows.shared_wide, shared, nullptr, false, true});
    jobs[1].push_back(
        {&experts.shared_down, rows.shared_wide, shared, call.m, rows.shared_found, hidden, nullptr, false, false});
  }
};

template <bool BF16>
void add_up(const Call& call, const Pairs& pairs, const Rows& rows, int token) {
  constexpr int size = BF16 ? 2 : 4;
  const int hidden = call.hidden(), top_k = call.experts.top_k;
  const int32_t* places = &pairs.places[(size_t)token * top_k];
  const float* chances = &pairs.chances[(size_t)token * top_k];
  const int64_t y = token * call.y_stride * size;
  for (int at = 0; at < hidden; at += 16) {
    const int count = hidden - at;
    f16v sum = {};
    for (int i = 0; i < top_k; ++i)
      sum += rounded<BF16>(load_part<BF16>(rows.found + (int64_t)places[i] * hidden * size, at, count) *
                           splat(chances[i]));
    if (call.shared()) {
      f16v shared = load_part<BF16>(rows.shared_found + (int64_t)token * hidden * size, at, count);
      sum = rounded<BF16>(sum) + rounded<BF16>(shared * splat(pairs.gates[token]));
    }
    if (call.residual) sum = load_part<BF16>(call.residual + y, at, count) + rounded<BF16>(sum);
    store_part<BF16>(call.y + y, at, sum, count);
  }
}

bool run(const Call& call) {
  static thread_local Pairs kept_pairs;
  static thread_local Jobs kept_jobs;
  Pairs& pairs = kept_pairs;  // a reference, so that workers in parallel regions use this thread's variable
  Jobs& jobs = kept_jobs;
  char* scratch = scratch_of_thread(Rows::bytes(call));
  if (!scratch || !choose(call, pairs)) return false;
  const Rows rows(call, scratch);
  jobs.make(call, pairs, rows);
  for (const auto& some : jobs.jobs)
    if (!linear_run_jobs(some.data(), (int)some.size())) return false;
#pragma omp parallel for schedule(static) if ((int64_t)call.m * call.experts.top_k * call.hidden() > kSmall)
  for (int token = 0; token < call.m; ++token) (call.bf16() ? add_up<true> : add_up<false>)(call, pairs, rows, token);
  return true;
}

}  // namespace
}  // namespace mm

extern "C" int32_t mm_experts_run(const mm_experts* experts, const void* x, int64_t x_stride, int32_t m, void* y,
                                  int64_t y_stride, const void* residual) {
  const int64_t size = experts->router.dtype == MM_BF16 ? 2 : 4;
  const int most = experts->top_k < mm::kMostPairs ? mm::kMostPairs / experts->top_k : 1;
  try {
    for (int row = 0; row < m; row += most) {
      const int count = m - row < most ? m - row : most;
      const char* added = residual ? (const char*)residual + row * y_stride * size : nullptr;
      if (!mm::run({*experts, (const char*)x + row * x_stride * size, x_stride, count, (char*)y + row * y_stride * size,
                    y_stride, added}))
        return 1;
    }
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
