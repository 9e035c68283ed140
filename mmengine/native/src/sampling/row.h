// One row during sampling: scaled logits in groups of 64, and the maximum of each group.
#pragma once

#include <limits>
#include <vector>

#include "common/vec.h"

namespace mm {

constexpr int GROUP = 64;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Row {
  std::vector<float> scaled;  // (logit - largest) / temperature; padded with -inf
  std::vector<float> most;    // maximum of each group
  std::vector<float> some;    // scratch: the values among which top-k or top-p selects
  int groups = 0;
};

MM_INLINE f16v larger(f16v a, f16v b) { return a > b ? a : b; }

MM_INLINE float largest_lane(f16v v) {
  float most = v[0];
  for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
  return most;
}

// Returns a bit mask: bit i is set if lane i of a is at least lane i of b.
MM_INLINE uint32_t at_least(f16v a, f16v b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
  uint32_t bits = 0;
  i16v mask = a >= b;
  for (int i = 0; i < 16; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}

// Returns the smallest scaled logit that top-k and top-p keep.
float least_kept(Row& row, int vocab, int top_k, float top_p);

}  // namespace mm
