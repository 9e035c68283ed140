// What OpenMP says of threads, and one thread where kernels are compiled without it.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace mm {

#if defined(_OPENMP)
// That a parallel region would have at most, which begins here.
inline int most_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

// Within a region: the thread's number, and how many there are.
inline int this_thread() { return omp_get_thread_num(); }
inline int num_threads() { return omp_get_num_threads(); }
#else
inline int most_threads() { return 1; }
inline int this_thread() { return 0; }
inline int num_threads() { return 1; }
#endif

}  // namespace mm
