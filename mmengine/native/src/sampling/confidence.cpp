#include "sampling/confidence.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "sampling/row.h"

namespace mm {

namespace {

constexpr int WORD = 32;           // tokens per word of the mask
constexpr int FEW_VALUES = 1 << 17;  // up to this many values, a second thread costs more than it saves
constexpr float LEAST = -80.0f;    // the mass of a token with a smaller shifted logit is negligible

struct Likely {
  float value;
  int32_t token;

  bool is_before(const Likely& other) const {
    return value > other.value || (value == other.value && token < other.token);
  }
};

// The words of a row's mask that allow any tokens: each word's index and largest allowed logit.
struct Words {
  std::vector<int32_t> index;
  std::vector<float> most;
  std::vector<float> some;
};

// Returns `values`, with NEVER in each lane whose bit is not set.
f16v keep_lanes(f16v values, uint32_t bits) {
  const i16v lane_bits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  i16v is_kept = ((i16v{} + (int32_t)bits) & lane_bits) != 0;
  return is_kept ? values : f16v{} + NEVER;
}

struct Reader {
  const float* logits;
  const uint32_t* bits;
  int32_t vocab;

  int count(int word) const { return std::min(WORD, vocab - word * WORD); }

  uint32_t allowed(int word) const {
    int n = count(word);
    return bits[word] & (n < WORD ? (1u << n) - 1 : ~0u);
  }

  // Returns the word's logits, with NEVER for tokens that are not allowed.
  const float* read(int word, float* buffer) const {
    uint32_t left = allowed(word);
    const float* from = logits + (int64_t)word * WORD;
    if (left == ~0u) return from;
    if (count(word) == WORD) {
      store_as(buffer, keep_lanes(load_as<f16v>(from), left));
      store_as(buffer + 16, keep_lanes(load_as<f16v>(from + 16), left >> 16));
      return buffer;
    }
    std::fill(buffer, buffer + WORD, NEVER);
    for (; left; left &= left - 1) {
      int i = __builtin_ctz(left);
      buffer[i] = from[i];
    }
    return buffer;
  }
};

// Adds the word's mass to `mass`, and mass times shifted logit to `moment`.
void weigh(const float* values, float most, f16v& mass, f16v& moment) {
  for (int i = 0; i < WORD; i += 16) {
    f16v shifted = load_as<f16v>(values + i) - most;
    f16v each = exp_clamped(shifted);
    auto counts = shifted > LEAST;  // false for NaN
    each = counts ? each : f16v{};
    mass += each;
    moment += each * (counts ? shifted : f16v{});
  }
}

double sum_of(f16v lanes) {
  double total = 0;
  for (int lane = 0; lane < 16; lane++) total += lanes[lane];
  return total;
}

void take_likely(const mm_allowed& what, const Reader& reader, Words& words, int row) {
  int k = what.likely;
  float bound = NEVER;
  if (k <= (int)words.most.size()) {  // the k-th largest word maximum is a lower bound for the k-th largest logit
    words.some = words.most;
    std::nth_element(words.some.begin(), words.some.begin() + (k - 1), words.some.end(), std::greater<float>());
    bound = words.some[k - 1];
  }
  std::vector<Likely> found;
  alignas(64) float buffer[WORD];
  for (size_t i = 0; i < words.index.size(); i++) {
    if (words.most[i] < bound) continue;
    const float* values = reader.read(words.index[i], buffer);
    for (int n = 0; n < reader.count(words.index[i]); n++)
      if (values[n] >= bound && values[n] > NEVER) found.push_back({values[n], words.index[i] * WORD + n});
  }
  int kept = std::min(k, (int)found.size());
  std::partial_sort(found.begin(), found.begin() + kept, found.end(),
                    [](const Likely& a, const Likely& b) { return a.is_before(b); });
  for (int n = 0; n < k; n++) {
    what.best[(int64_t)row * k + n] = n < kept ? found[n].value : NEVER;
    what.best_tokens[(int64_t)row * k + n] = n < kept ? found[n].token : -1;
  }
}

void weigh_row(const mm_allowed& what, Words& words, int row) {
  Reader reader{what.logits + what.places[row] * what.stride, what.bits + (int64_t)row * what.words, what.vocab};
  alignas(64) float buffer[WORD];
  words.index.clear();
  words.most.clear();
  int32_t num_allowed = 0;
  float most = NEVER;
  for (int word = 0; word * WORD < what.vocab; word++) {
    uint32_t allowed = reader.allowed(word);
    if (!allowed) continue;
    num_allowed += __builtin_popcount(allowed);
    const float* values = reader.read(word, buffer);
    float here = largest_lane(larger(load_as<f16v>(values), load_as<f16v>(values + 16)));
    words.index.push_back(word);
    words.most.push_back(here);
    most = std::max(most, here);
  }
  f16v mass{}, moment{};
  double total = 0, weighted = 0;
  for (size_t i = 0; i < words.index.size(); i++) {
    if (!(words.most[i] - most > LEAST)) continue;
    weigh(reader.read(words.index[i], buffer), most, mass, moment);
    if (i % 256 == 255) {  // sums of many floats lose digits
      total += sum_of(mass), weighted += sum_of(moment);
      mass = moment = f16v{};
    }
  }
  total += sum_of(mass), weighted += sum_of(moment);
  what.num_allowed[row] = num_allowed;
  what.log_sum[row] = num_allowed == 1 ? most : (float)(most + std::log(total));
  what.entropy[row] = num_allowed == 1 ? 0.0f : (float)std::max(0.0, std::log(total) - weighted / total);
  take_likely(what, reader, words, row);
}

}  // namespace

}  // namespace mm

extern "C" void mm_weigh_allowed(const mm_allowed* what) {
#pragma omp parallel if ((int64_t)what->rows * what->vocab > mm::FEW_VALUES)
  {
    mm::Words words;
#pragma omp for schedule(dynamic)
    for (int row = 0; row < what->rows; row++) mm::weigh_row(*what, words, row);
  }
}
