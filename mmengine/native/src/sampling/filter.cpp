// Computes the smallest scaled logit that top-k and top-p keep, without sorting the vocabulary.
#include <algorithm>
#include <functional>

#include "sampling/row.h"

namespace mm {

namespace {

constexpr int BUCKETS = 1024;
constexpr float PER_UNIT = 32;   // buckets per unit of a logit
constexpr float NEAR = -12;      // top-p usually keeps only scaled logits above this; e^-12 is 6e-6

int bucket_of(float value) { return value > -(BUCKETS - 1) / PER_UNIT ? (int)(-value * PER_UNIT) : BUCKETS - 1; }

// Writes the k largest values of the row, in descending order, to row.some.
void take_largest(Row& row, int vocab, int k) {
  float bound = NEVER;
  if (k <= row.groups) {  // the k-th largest group maximum is a lower bound for the k-th largest value
    row.some.assign(row.most.begin(), row.most.begin() + row.groups);
    std::nth_element(row.some.begin(), row.some.begin() + (k - 1), row.some.end(), std::greater<float>());
    bound = row.some[k - 1];
  }
  row.some.clear();
  for (int group = 0; group < row.groups; group++) {
    if (row.most[group] < bound) continue;
    int end = std::min((group + 1) * GROUP, vocab);
    for (int token = group * GROUP; token < end; token++)
      if (row.scaled[token] >= bound) row.some.push_back(row.scaled[token]);
  }
  std::nth_element(row.some.begin(), row.some.begin() + (k - 1), row.some.end(), std::greater<float>());
  row.some.resize(k);
}

// Returns the value at which the cumulative mass of `values` (descending) reaches `wanted`. `before`: the mass of all
// larger values.
float last_before(const std::vector<float>& values, double before, double wanted) {
  float least = values[0];
  for (size_t i = 0; i < values.size() && before < wanted; i++) {
    least = values[i];
    before += exp_clamped(splat(values[i]))[0];
  }
  return least;
}

// Returns the total mass of the groups whose maximum reaches `bound`, and adds their masses to the buckets.
double weigh(const Row& row, float bound, double* buckets) {
  alignas(64) float mass[GROUP];
  double total = 0;
  for (int group = 0; group < row.groups; group++) {
    if (row.most[group] < bound) continue;
    const float* scaled = &row.scaled[group * GROUP];
    f16v sum{};
    for (int i = 0; i < GROUP; i += 16) {
      f16v values = load_as<f16v>(scaled + i), each = exp_clamped(values);
      each = values > -87.0f ? each : f16v{};  // the mass of smaller values is negligible
      store_as(mass + i, each);
      sum += each;
    }
    for (int lane = 0; lane < 16; lane++) total += sum[lane];
    if (buckets == nullptr) continue;
    for (int i = 0; i < GROUP; i++) buckets[bucket_of(scaled[i])] += mass[i];
  }
  return total;
}

// Writes the row's values in `bucket`, in descending order, to row.some.
void take_bucket(Row& row, int vocab, int bucket) {
  row.some.clear();
  float bound = bucket == BUCKETS - 1 ? NEVER : -(bucket + 1) / PER_UNIT;
  for (int group = 0; group < row.groups; group++) {
    if (row.most[group] < bound) continue;
    int end = std::min((group + 1) * GROUP, vocab);
    for (int token = group * GROUP; token < end; token++)
      if (bucket_of(row.scaled[token]) == bucket) row.some.push_back(row.scaled[token]);
  }
  std::sort(row.some.begin(), row.some.end(), std::greater<float>());
}

float nucleus_end(Row& row, int vocab, float top_p) {
  double wanted = top_p * weigh(row, NEVER, nullptr);
  for (float bound : {NEAR, NEVER}) {
    double buckets[BUCKETS] = {}, before = 0;
    weigh(row, bound, buckets);
    int last = bound == NEVER ? BUCKETS - 1 : bucket_of(bound) - 1;  // buckets above the bound are complete
    for (int bucket = 0; bucket <= last; bucket++) {
      if (buckets[bucket] > 0 && before + buckets[bucket] >= wanted) {
        take_bucket(row, vocab, bucket);
        return last_before(row.some, before, wanted);
      }
      before += buckets[bucket];
    }
  }
  return NEVER;  // rounding kept the mass below `wanted`: keep everything
}

}  // namespace

float least_kept(Row& row, int vocab, int top_k, float top_p) {
  if (top_k >= vocab) return top_p < 1 ? nucleus_end(row, vocab, top_p) : NEVER;
  take_largest(row, vocab, top_k);
  if (top_p >= 1) return *std::min_element(row.some.begin(), row.some.end());
  std::sort(row.some.begin(), row.some.end(), std::greater<float>());
  double total = 0;
  for (float value : row.some) total += exp_clamped(splat(value))[0];
  return last_before(row.some, 0, top_p * total);
}

}  // namespace mm
