// float32 micro-kernels: a block of rows by 32 columns in registers, over all of k in its order.
#include "linear_job.h"
#include "linear_vec.h"

namespace mm {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kVectors = 2, kRows = 14;
#else
constexpr int kWidth = 8, kVectors = 2, kRows = 6;
#endif
typedef float vec __attribute__((vector_size(kWidth * 4)));

// c [M, 32]'s `kVectors` vectors from column `at` on = x [M, k] * w [k, 32].
template <int M>
void block(const float* x, int64_t x_stride, const float* w, int64_t k, float* c) {
  vec sums[M][kVectors] = {};
  for (int64_t t = 0; t < k; ++t) {
    vec b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b[v] = load_as<vec>(w + t * kPanel + v * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      vec a = x[i * x_stride + t] - vec{};  // unlike + 0, - 0 is no operation
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[i][v] += a * b[v];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store_as(c + i * kPanel + v * kWidth, sums[i][v]);
}

typedef void (*Block)(const float*, int64_t, const float*, int64_t, float*);

template <int... M>
struct Blocks {
  static constexpr Block of[] = {nullptr, block<M>...};
};
#if defined(__AVX512F__)
typedef Blocks<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14> All;
#else
typedef Blocks<1, 2, 3, 4, 5, 6> All;
#endif

}  // namespace

void linear_run_fp32(const LinearJob& job, const Share& share) {
  alignas(64) float c[kRows * kPanel];
  for (int panel = share.panel0; panel < share.panel1; ++panel) {
    const float* w = (const float*)job.panel(panel);
    for (int row = share.row0; row < share.row1; row += kRows) {
      int rows = share.row1 - row < kRows ? share.row1 - row : kRows;
      const float* x = (const float*)job.x + row * job.x_stride;
      for (int at = 0; at < kPanel; at += kVectors * kWidth)
        All::of[rows](x, job.x_stride, w + at, job.linear->k, c + at);
      linear_store(job, c, kPanel, row, rows, panel);
    }
  }
}

}  // namespace mm
