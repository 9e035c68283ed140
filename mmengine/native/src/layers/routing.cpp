#include "layers/routing.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "common/vec.h"

namespace mm {
namespace {

typedef std::pair<float, int64_t> Chance;  // probability and index of an expert

bool likelier(const Chance& a, const Chance& b) {
  return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
}

// Moves the top_k largest probabilities to the front. Calls the standard library as torch does
// (aten/src/ATen/native/TopKImpl.h), so that equal probabilities have the same order.
void take(std::vector<Chance>& all, int64_t top_k) {
  const auto begin = all.begin();
  if (top_k * 64 <= (int64_t)all.size()) {
    std::partial_sort(begin, begin + top_k, all.end(), likelier);
    return;
  }
  std::nth_element(begin, begin + top_k - 1, all.end(), likelier);
  std::sort(begin, begin + top_k - 1, likelier);
}

}  // namespace

void route(const mm_experts& experts, const float* logits, int32_t* chosen, float* chances) {
  static thread_local std::vector<Chance> all;
  all.resize(experts.count);
  float most = -INFINITY, sum = 0, taken = 0;
  for (int i = 0; i < experts.count; ++i) most = std::isnan(logits[i]) ? logits[i] : std::max(most, logits[i]);
  for (int i = 0; i < experts.count; ++i) {
    all[i] = {expf(logits[i] - most), i};
    sum += all[i].first;
  }
  for (Chance& one : all) one.first /= sum;
  take(all, experts.top_k);
  for (int i = 0; i < experts.top_k; ++i) taken += all[i].first;
  const bool rounds = experts.router.dtype == MM_BF16;
  for (int i = 0; i < experts.top_k; ++i) {
    float chance = experts.norm_top_k ? all[i].first / taken : all[i].first;
    chances[i] = rounds ? round_bf16(splat(chance))[0] : chance;
    chosen[i] = (int32_t)all[i].second;
  }
}

}  // namespace mm
