// float32 micro-kernels, which keep the sums of a few rows and columns in registers. Every path sums over k in order
// with fused multiply-adds, so a row's result has the same bits in any batch.
#include "common/vec.h"
#include "linear/job.h"

namespace mm {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kMostSums = 28;  // sums use at most 28 of 32 registers
#else
constexpr int kWidth = 8, kMostSums = 12;  // sums use at most 12 of 16 registers
#endif
constexpr int kVectors = kPanel / kWidth;  // per panel
constexpr int kTall = kMostSums / 2;       // most rows of a block
constexpr int kMostRows = 512;             // most rows whose sums are kept in memory between pieces of k
constexpr int64_t kPiece = 192;            // values of k per piece: 24 KB of a panel, for the first-level cache
constexpr int64_t kAhead = 64 * kPanel;    // floats: weights are prefetched 8 KB ahead
typedef float vec __attribute__((vector_size(kWidth * 4)));

struct Block {
  const float* x;
  int64_t x_stride;
  const float* w;   // the first column of the first panel, at the first k
  int64_t w_panel;  // floats between panels
  int64_t k;
  float* sums;  // rows of [kPanel], with sums_panel floats between panels
  int64_t sums_panel;
  bool first;
};

// Multiplies ROWS rows with VECTORS vectors of columns, from a panel or several neighbouring panels. FETCH: prefetches
// the weights.
template <int ROWS, int VECTORS, bool FETCH>
void multiply(const Block& b) {
  vec sums[ROWS][VECTORS] = {};
  const auto place = [&](int i, int v) {
    return b.sums + v / kVectors * b.sums_panel + i * kPanel + v % kVectors * kWidth;
  };
  if (!b.first)
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[i][v] = load_as<vec>(place(i, v));
  const float *x = b.x, *w = b.w;
  for (int64_t t = 0; t < b.k; ++t, ++x, w += kPanel) {
    vec columns[VECTORS];
    if constexpr (FETCH) {
      __builtin_prefetch(w + kAhead);
      __builtin_prefetch(w + kAhead + 16);
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) columns[v] = load_as<vec>(w + v / kVectors * b.w_panel + v % kVectors * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      vec row = x[i * b.x_stride] - vec{};  // broadcasts x; - 0 compiles to no operation, unlike + 0
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[i][v] += row * columns[v];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store_as(place(i, v), sums[i][v]);
}

// Returns how many vectors of columns fit into the sum registers, up to `most`.
constexpr int vectors_of(int rows, int most) {
  return rows * 8 <= kMostSums && most >= 8 ? 8 : rows * 4 <= kMostSums && most >= 4 ? 4 : 2;
}

typedef void (*Multiply)(const Block&);
template <int... ROWS>
struct Table {
  static constexpr Multiply fetching[] = {nullptr, multiply<ROWS, vectors_of(ROWS, kVectors), true>...};
  static constexpr Multiply near[] = {nullptr, multiply<ROWS, vectors_of(ROWS, kVectors), false>...};
  static constexpr Multiply wide[] = {nullptr, multiply<ROWS, vectors_of(ROWS, 8), false>...};
};
#if defined(__AVX512F__)
typedef Table<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14> Kernels;
#else
typedef Table<1, 2, 3, 4, 5, 6> Kernels;
#endif

// Multiplies a block of rows with a panel, in as many passes as the registers require.
void multiply_panel(Block block, int rows, bool fetch) {
  int vectors = vectors_of(rows, kVectors);
  Multiply multiply = (fetch ? Kernels::fetching : Kernels::near)[rows];
  for (int at = 0; at < kVectors; at += vectors) {
    multiply(block);
    block.w += vectors * kWidth;
    block.sums += vectors * kWidth;
  }
}

// Multiplies one block of rows with several panels at once, for a short k. The independent sums hide the latency of
// additions. Returns the first panel that remains.
int run_wide(const LinearJob& job, const Share& share) {
  alignas(64) float sums[kTall * kPanel * 4];
  int rows = share.row1 - share.row0, panels = vectors_of(rows, 8) / kVectors, panel = share.panel0;
  if (panels < 2) return panel;
  Block block = {(const float*)job.x + share.row0 * job.x_stride,
                 job.x_stride,
                 nullptr,
                 (int64_t)job.linear->k * kPanel,
                 job.linear->k,
                 sums,
                 (int64_t)rows * kPanel,
                 true};
  for (; panel + panels <= share.panel1; panel += panels) {
    block.w = (const float*)job.panel(panel);
    Kernels::wide[rows](block);
    for (int i = 0; i < panels; ++i) linear_store(job, sums + i * rows * kPanel, kPanel, share.row0, rows, panel + i);
  }
  return panel;
}

constexpr int64_t kDecoded = 128;  // values of k whose decoded weights fit into the L1 cache

// Multiplies rows with panels of GGUF blocks. Decodes kDecoded values of k at a time, or decodes in registers for a
// single row.
void run_blocks(const LinearJob& job, const Share& share) {
  alignas(64) float sums[kMostRows * kPanel], tile[kDecoded * kPanel];
  const int rows = share.row1 - share.row0, k = job.linear->k;
  const int blocks = (int)ceil_div(rows, kTall), tall = (int)ceil_div(rows, blocks);
  const float* first = (const float*)job.x + share.row0 * job.x_stride;
  for (int panel = share.panel0; panel < share.panel1; ++panel) {
    const int type = block_type_of(*job.linear, panel);
    const char* w = job.panel(panel);
    if (rows == 1) block_multiply_row(type, w, first, k, sums);
    for (int64_t t = 0; t < k && rows > 1; t += kDecoded) {
      const int64_t piece = k - t < kDecoded ? k - t : kDecoded;
      block_decode(type, w, t, piece, tile);
      for (int row = 0; row < rows; row += tall) {
        const int height = rows - row < tall ? rows - row : tall;
        multiply_panel({first + row * job.x_stride + t, job.x_stride, tile, 0, piece, sums + row * kPanel, 0, t == 0},
                       height, false);
      }
    }
    linear_store(job, sums, kPanel, share.row0, rows, panel);
  }
}

void run_rows(const LinearJob& job, const Share& share) {
  if (job.linear->form == MM_BLOCKS) return run_blocks(job, share);
  alignas(64) float sums[kMostRows * kPanel];
  int rows = share.row1 - share.row0, k = job.linear->k, panel = share.panel0;
  if (rows <= kTall && k <= kPiece * 2) panel = run_wide(job, share);
  int blocks = (int)ceil_div(rows, kTall), tall = (int)ceil_div(rows, blocks);
  for (; panel < share.panel1; ++panel) {
    const float* w = (const float*)job.panel(panel);
    for (int64_t t = 0; t < k; t += kPiece) {
      int64_t piece = k - t < kPiece ? k - t : kPiece;
      for (int row = 0; row < rows; row += tall) {
        const float* x = (const float*)job.x + (share.row0 + row) * job.x_stride + t;
        int height = rows - row < tall ? rows - row : tall;
        Block block = {x, job.x_stride, w + t * kPanel, 0, piece, sums + row * kPanel, 0, t == 0};
        multiply_panel(block, height, row == 0);
      }
    }
    linear_store(job, sums, kPanel, share.row0, rows, panel);
  }
}

}  // namespace

void linear_run_fp32(const LinearJob& job, const Share& share) {
  for (int row = share.row0; row < share.row1; row += kMostRows) {
    int last = share.row1 - row < kMostRows ? share.row1 : row + kMostRows;
    run_rows(job, {row, last, share.panel0, share.panel1});
  }
}

}  // namespace mm
