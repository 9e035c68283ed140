// Asking memory for what is read later, and whose cores do so by themselves.
#pragma once

#include "common/vec.h"

namespace mm {

inline bool is_amd() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}
inline const bool kIsAmd = is_amd();

// A line so many bytes ahead is asked of memory into the second cache, and one of that into the first one, which alone
// has too few lines on their way.
template <int FAR, int NEAR>
MM_INLINE void fetch_ahead(const char* line) {
  _mm_prefetch(line + FAR, _MM_HINT_T1);
  _mm_prefetch(line + NEAR, _MM_HINT_T0);
}

}  // namespace mm
