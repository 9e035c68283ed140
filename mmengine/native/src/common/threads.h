// Thread counts from OpenMP, or one thread if the kernels are compiled without OpenMP.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace mm {

#if defined(_OPENMP)
// Maximum number of threads in a parallel region that begins here.
inline int most_threads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

// Within a region: the thread's number, and the number of threads.
inline int this_thread() { return omp_get_thread_num(); }
inline int num_threads() { return omp_get_num_threads(); }
#else
inline int most_threads() { return 1; }
inline int this_thread() { return 0; }
inline int num_threads() { return 1; }
#endif

}  // namespace mm
