#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>

#include "sampling/philox.h"
#include "sampling/row.h"

namespace mm {

namespace {

// Two scores that are closer than this may be in another order in torch. The logarithms of two libraries differ by
// less than a tenth of the margin.
constexpr float MARGIN = 1e-4f;
constexpr float MOST_NOISE = 22.9f;
constexpr float LN2 = 0.6931472f;
constexpr int FEW = 1 << 15;  // number of values up to which one thread is faster than two

struct Best {
  int32_t token = 0;
  float score = NEVER, second = NEVER;

  void offer(int32_t offered, float its_score) {
    if (its_score > score) {
      second = score;
      score = its_score;
      token = offered;
    } else if (its_score > second) {
      second = its_score;
    }
  }
};

// Returns the Gumbel noise for u = (bits + 1/2) / 2^32. u is rounded to float32 as in gumbel.py. The logarithms have
// float64 precision.
float noise_of(uint32_t bits) {
  float u = std::min(((float)bits + 0.5f) * 0x1p-32f, 0x1.fffffep-1f);
  return (float)-std::log(-std::log1p(-(double)u));
}

// Fills `row`, and sets `token` to a token with the largest logit. Returns false if the largest logit is not finite.
bool scale(Row& row, const float* logits, int vocab, float temperature, int* token) {
  row.groups = (vocab + GROUP - 1) / GROUP;
  row.scaled.resize((size_t)row.groups * GROUP);
  row.most.resize(row.groups);
  f16v most = splat(NEVER);
  int whole = vocab / 16 * 16;
  for (int i = 0; i < whole; i += 16) most = larger(load_as<f16v>(logits + i), most);
  float largest = largest_lane(most);
  for (int i = whole; i < vocab; i++) largest = std::max(largest, logits[i]);
  if (!std::isfinite(largest)) return false;
  for (int i = 0; i < whole; i += 16) store_as(&row.scaled[i], (load_as<f16v>(logits + i) - largest) / temperature);
  for (int i = whole; i < vocab; i++) row.scaled[i] = (logits[i] - largest) / temperature;
  std::fill(row.scaled.begin() + vocab, row.scaled.end(), NEVER);
  *token = 0;
  for (int group = 0; group < row.groups; group++) {
    const float* scaled = &row.scaled[group * GROUP];
    f16v found = load_as<f16v>(scaled);
    for (int i = 16; i < GROUP; i += 16) found = larger(load_as<f16v>(scaled + i), found);
    row.most[group] = largest_lane(found);
    if (row.most[group] == 0) *token = group * GROUP;
  }
  while (*token < vocab - 1 && row.scaled[*token] != 0) ++*token;
  return true;
}

// Offers the tokens in a group that may be the best. The noise -log(-log(1 - u)) is at most -log(u), and -log(u) is at
// most log(2) times (leading zeros of the bits + 1). This bound excludes most tokens without a logarithm.
void draw_group(const Row& row, int group, float least, const PhiloxKey& key, Best& best) {
  alignas(64) uint32_t bits[GROUP];
  philox_bits(key, group * GROUP, bits);
  for (int i = 0; i < GROUP; i += 16) {
    const float* scaled = &row.scaled[group * GROUP + i];
    f16v values = load_as<f16v>(scaled);
    f16v words = __builtin_convertvector(load_as<u16v>(bits + i), f16v) + 0.5f;
    i16v exponents = ((i16v)words >> 23) - 127;
    f16v bound = values + __builtin_convertvector(32 - exponents, f16v) * LN2;
    uint32_t lanes = at_least(bound, splat(best.score - 0.01f)) & at_least(values, splat(least));
    for (; lanes; lanes &= lanes - 1) {
      int lane = __builtin_ctz(lanes);
      best.offer(group * GROUP + i + lane, scaled[lane] + noise_of(bits[i + lane]));
    }
  }
}

void draw(const mm_draw& what, int index, Row& row) {
  int likely;
  const float* logits = what.logits + index * what.stride;
  what.tokens[index] = 0;
  if (!scale(row, logits, what.vocab, std::max(what.temperature[index], 1e-10f), &likely)) return;
  float least = least_kept(row, what.vocab, what.top_k[index], what.top_p[index]);
  least = std::max({least, what.log_min_p[index], std::numeric_limits<float>::lowest()});
  uint64_t seed = (uint64_t)what.seed[index];
  PhiloxKey key{(uint32_t)seed, (uint32_t)(seed >> 32), (uint32_t)what.output_index[index],
                (uint32_t)what.sample_index[index]};
  Best best;
  draw_group(row, likely / GROUP, least, key, best);  // first, so that the bound is tight from the start
  for (int group = 0; group < row.groups; group++)
    if (group != likely / GROUP && row.most[group] >= least && row.most[group] + MOST_NOISE >= best.score)
      draw_group(row, group, least, key, best);
  what.tokens[index] = best.score - best.second < MARGIN ? -1 : best.token;
}

}  // namespace

}  // namespace mm

extern "C" void mm_draw_tokens(const mm_draw* what) {
#pragma omp parallel if ((int64_t)what->rows * what->vocab > mm::FEW && what->rows > 1)
  {
    mm::Row row;
#pragma omp for schedule(dynamic, 1)
    for (int index = 0; index < what->rows; index++) mm::draw(*what, index, row);
  }
}
