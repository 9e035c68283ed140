// bfloat16 without AMX: x and weights as they are through vdpbf16ps, or as float32 through FMA (AVX-512, AVX2).
#include "linear_fp8.h"
#include "linear_job.h"
#include "linear_vec.h"

#if !defined(__AMX_BF16__)

namespace mm {
namespace {

#if defined(__AVX512BF16__)
constexpr int kRows = 12;
constexpr int kAhead = 512;  // bytes: the cores that have this and no AMX, AMD's, fetch ahead themselves
typedef uint16_t Scratch;

// Sums of M rows of a panel: they begin as zeros, or go on from what c is.
template <int M>
MM_INLINE void begin_sums(bool first, const float* c, __m512 (&sums)[M][2]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      sums[i][half] = first ? _mm512_setzero_ps() : load_as<__m512>(c + i * kPanel + half * 16);
}

// They grow by a pair of k.
template <int M>
MM_INLINE void add_pair(const Scratch* x, int64_t x_stride, __m512i low, __m512i high, __m512 (&sums)[M][2]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    __m512bh a = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x + i * x_stride));
    sums[i][0] = _mm512_dpbf16_ps(sums[i][0], a, (__m512bh)low);
    sums[i][1] = _mm512_dpbf16_ps(sums[i][1], a, (__m512bh)high);
  }
}

template <int M>
MM_INLINE void store_sums(const __m512 (&sums)[M][2], float* c) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    store_as(c + i * kPanel, sums[i][0]);
    store_as(c + i * kPanel + 16, sums[i][1]);
  }
}

// c [M, 32] = x [M, steps * 32] * panel, and unless `first` what c was.
template <int M>
MM_INLINE void multiply(const Scratch* x, int64_t x_stride, const char* w, int64_t steps, bool first, float* c) {
  __m512 sums[M][2];
  begin_sums<M>(first, c, sums);
  for (int64_t step = 0; step < steps; ++step, w += 2048, x += kStep)
    for (int pair = 0; pair < 16; ++pair) {
      const char* at = w + pair * 128;
      __builtin_prefetch(at + kAhead, 0, 2);
      __builtin_prefetch(at + kAhead + 64, 0, 2);
      add_pair<M>(x + 2 * pair, x_stride, load_as<__m512i>(at), load_as<__m512i>(at + 64), sums);
    }
  store_sums<M>(sums, c);
}

template <int M>
void block(const Scratch* x, int64_t x_stride, const char* w, int64_t steps, float* c) {
  multiply<M>(x, x_stride, w, steps, true, c);
}

// A group of FP8 whose columns share scales, decoded in registers.
template <int M>
void multiply_fp8(const Scratch* x, int64_t x_stride, const char* group, int size, bool first, float* c) {
  const Fp8Tables tables(group);
  const char* codes = group + kScaleBytes;
  __m512 sums[M][2];
  begin_sums<M>(first, c, sums);
  for (int t = 0; t < size; t += 4, codes += 128, x += 4) {
    __m512i low[2], high[2];  // of two pairs
    tables.of[0].decode(codes, low[0], low[1]);
    tables.of[1].decode(codes + 64, high[0], high[1]);
    add_pair<M>(x, x_stride, low[0], high[0], sums);
    add_pair<M>(x + 2, x_stride, low[1], high[1], sums);
  }
  store_sums<M>(sums, c);
}

// c [M, 32] = x [M, k] * a panel of FP8; where scales differ a group is decoded into the first cache.
template <int M>
void block_fp8(const Scratch* x, int64_t x_stride, const char* w, const mm_linear& linear, float* c) {
  alignas(64) char tile[MM_MAX_GROUP * 64];
  for (int64_t first = 0; first < linear.k; first += linear.group, w += group_bytes(linear)) {
    if (Fp8Tables::fit(w)) {
      multiply_fp8<M>(x + first, x_stride, w, linear.group, first == 0, c);
    } else {
      fp8_decode(w, linear.group, tile);
      multiply<M>(x + first, x_stride, tile, linear.group / kStep, first == 0, c);
    }
  }
}
#elif defined(__AVX512F__)
constexpr int kRows = 12;
constexpr int kAhead = 8192;  // bytes: weights come from memory, later ones are asked for
typedef float Scratch;

// Sums and columns of a panel lie apart by halves; a pair of k becomes two multiply-adds, the even one first.
template <int M>
void block(const Scratch* x, int64_t x_stride, const char* w, int64_t steps, float* c) {
  f16v sums[M][2] = {};
  for (int64_t step = 0; step < steps; ++step, w += 2048, x += kStep) {
    for (int pair = 0; pair < 16; ++pair) {
      const char* at = w + pair * 128;
      __builtin_prefetch(at + kAhead);
      __builtin_prefetch(at + kAhead + 64);
      u16v low = load_as<u16v>(at), high = load_as<u16v>(at + 64);
      f16v even[2] = {(f16v)(low << 16), (f16v)(high << 16)};
      f16v odd[2] = {(f16v)(low & 0xffff0000u), (f16v)(high & 0xffff0000u)};
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const float* a = x + i * x_stride + 2 * pair;
        f16v first = splat(a[0]), second = splat(a[1]);
        sums[i][0] += first * even[0];
        sums[i][1] += first * even[1];
        sums[i][0] += second * odd[0];
        sums[i][1] += second * odd[1];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    store_as(c + i * kPanel, sums[i][0]);
    store_as(c + i * kPanel + 16, sums[i][1]);
  }
}
#else
constexpr int kRows = 3;
constexpr int kAhead = 8192;
typedef float Scratch;
typedef float f8v __attribute__((vector_size(32)));
typedef uint32_t u8v __attribute__((vector_size(32)));

template <int M>
void block(const Scratch* x, int64_t x_stride, const char* w, int64_t steps, float* c) {
  for (int half = 0; half < 2; ++half) {
    f8v sums[M][2] = {};
    for (int64_t pair = 0; pair < steps * 16; ++pair) {
      const char* at = w + pair * 128 + half * 64;
      __builtin_prefetch(at + kAhead);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        u8v bits = load_as<u8v>(at + v * 32);
        f8v even = (f8v)(bits << 16), odd = (f8v)(bits & 0xffff0000u);
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
          const float* a = x + i * x_stride + 2 * pair;
          sums[i][v] += even * a[0];
          sums[i][v] += odd * a[1];
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) store_as(c + i * kPanel + half * 16 + v * 8, sums[i][v]);
  }
}
#endif

typedef void (*Block)(const Scratch*, int64_t, const char*, int64_t, float*);

template <int... M>
struct Blocks {
  static constexpr Block of[] = {nullptr, block<M>...};
#if defined(__AVX512BF16__)
  static constexpr decltype(&block_fp8<1>) of_fp8[] = {nullptr, block_fp8<M>...};
#endif
};
#if defined(__AVX512F__)
typedef Blocks<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12> All;
#else
typedef Blocks<1, 2, 3> All;
#endif

// From a row of x to the next in scratch: a cache line further than k asks for, or rows of a k that is a power
// of two would all stand in the same set of the first cache.
int64_t row_stride(const LinearJob& job) { return (int64_t)job.steps() * kStep + 64 / (int64_t)sizeof(Scratch); }

}  // namespace

int64_t linear_scratch_bytes(const LinearJob& job) { return job.m * row_stride(job) * sizeof(Scratch); }

void linear_prepare(const LinearJob& job, void* scratch, int row0, int row1) {
  int64_t k = job.linear->k, padded = (int64_t)job.steps() * kStep, stride = row_stride(job);
  for (int row = row0; row < row1; ++row) {
    const uint16_t* from = (const uint16_t*)job.x + row * job.x_stride;
    Scratch* to = (Scratch*)scratch + row * stride;
    if constexpr (sizeof(Scratch) == 2) {
      memcpy(to, from, k * 2);
    } else {
      for (int64_t t = 0; t < k; ++t) {
        uint32_t bits = (uint32_t)from[t] << 16;
        memcpy(to + t, &bits, 4);
      }
    }
    memset(to + k, 0, (padded - k) * sizeof(Scratch));
  }
}

void linear_run_bf16(const LinearJob& job, const void* scratch, const Share& share) {
  alignas(64) float c[kRows * kPanel];
  int64_t stride = row_stride(job);
  int rows = share.row1 - share.row0, tall = (int)ceil_div(rows, ceil_div(rows, kRows));
  for (int panel = share.panel0; panel < share.panel1; ++panel) {
#if defined(__AVX512BF16__)
    if (job.linear->group && rows <= kRows) {
      const Scratch* x = (const Scratch*)scratch + share.row0 * stride;
      All::of_fp8[rows](x, stride, job.panel(panel), *job.linear, c);
      linear_store(job, c, kPanel, share.row0, rows, panel);
      continue;
    }
#endif
    const char* w = job.weights(panel, share.decoded);
    for (int row = share.row0; row < share.row1; row += tall) {
      int height = share.row1 - row < tall ? share.row1 - row : tall;
      All::of[height]((const Scratch*)scratch + row * stride, stride, w, job.steps(), c);
      linear_store(job, c, kPanel, row, height, panel);
    }
  }
}

}  // namespace mm

#endif
