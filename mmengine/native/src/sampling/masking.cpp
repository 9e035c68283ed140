#include "sampling/masking.h"

#include <algorithm>

#include "sampling/row.h"

namespace mm {

namespace {

constexpr int FEW = 1 << 17;  // up to this many values, a single thread is faster

struct Best {
  int32_t token = 0;
  float value = NEVER;

  void offer(int32_t offered, float its_value) {
    if (its_value > value) {
      value = its_value;
      token = offered;
    }
  }
};

// Offers 32 tokens that are all allowed. Usually no token beats `best`, and the first comparison is enough.
void offer_all(Best& best, const float* logits, int32_t first) {
  f16v most = larger(load_as<f16v>(logits), load_as<f16v>(logits + 16));
  if (largest_lane(most) <= best.value) return;
  for (int i = 0; i < 32; i++) best.offer(first + i, logits[i]);
}

void keep(const mm_masks& what, int row) {
  float* logits = what.logits + what.places[row] * what.stride;
  const uint32_t* bits = what.bits + (int64_t)row * what.words;
  bool writes = what.writes[row];
  Best best;
  for (int32_t first = 0; first < what.vocab; first += 32) {
    int count = std::min(32, what.vocab - first);
    uint32_t allowed = bits[first / 32], all = count < 32 ? (1u << count) - 1 : ~0u;
    allowed &= all;
    if (allowed == ~0u) {
      offer_all(best, logits + first, first);
      continue;
    }
    for (uint32_t left = allowed; left; left &= left - 1) {
      int i = __builtin_ctz(left);
      best.offer(first + i, logits[first + i]);
    }
    if (!writes) continue;
    for (int i = 0; i < count; i++)
      if (!(allowed >> i & 1)) logits[first + i] = NEVER;
  }
  what.tokens[row] = best.token;
  what.largest[row] = best.value;
}

}  // namespace

}  // namespace mm

extern "C" void mm_keep_allowed(const mm_masks* what) {
#pragma omp parallel for schedule(static) if ((int64_t)what->rows * what->vocab > mm::FEW)
  for (int row = 0; row < what->rows; row++) mm::keep(*what, row);
}
