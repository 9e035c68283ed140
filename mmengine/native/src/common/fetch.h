// Prefetches memory that is read later, and detects AMD CPUs, on which some kernels leave prefetching to the hardware.
#pragma once

#include "common/vec.h"

namespace mm {

inline bool is_amd() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}
inline const bool kIsAmd = is_amd();

// Prefetches the line FAR bytes ahead into the L2 cache, and the line NEAR bytes ahead into the L1 cache, because the
// L1 cache supports few outstanding lines.
template <int FAR, int NEAR>
MM_INLINE void fetch_ahead(const char* line) {
  _mm_prefetch(line + FAR, _MM_HINT_T1);
  _mm_prefetch(line + NEAR, _MM_HINT_T0);
}

}  // namespace mm
