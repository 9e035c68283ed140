// bfloat16 through AMX: tiles of 16 rows of x by 16 columns of w, 32 values of k at a time.
#include "linear_job.h"

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstring>

namespace mm {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Tiles 0-3 are sums (row tile, half), 4 and 5 x, 6 and 7 weights.
void configure(int rows0, int rows1) {
  TileConfig config = {};
  config.palette = 1;
  const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, 16, 16};
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = (uint8_t)(rows[i] ? rows[i] : 1);
  }
  asm volatile("" ::: "memory");
  _tile_loadconfig(&config);
}

// c [MT * 16, 32] = x tiles (one after the other along k, row tiles x_tile bytes apart) * panel.
template <int MT>
void block(const char* x, int64_t x_tile, const char* w, int64_t steps, float* c) {
  asm volatile("" ::: "memory");  // what tiles load was stored by now
  _tile_zero(0);
  _tile_zero(1);
  if (MT == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, w + step * 2048, 64);
    _tile_loadd(4, x + step * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + step * 2048 + 1024, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (MT == 2) {
      _tile_loadd(5, x + x_tile + step * 1024, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 128);
  _tile_stored(1, c + 16, 128);
  if (MT == 2) {
    _tile_stored(2, c + 16 * kPanel, 128);
    _tile_stored(3, c + 16 * kPanel + 16, 128);
  }
}

}  // namespace

int64_t linear_scratch_bytes(const LinearJob& job) {
  return ceil_div(job.m, 16) * job.steps() * 1024;
}

void linear_prepare(const LinearJob& job, void* scratch, int row0, int row1) {
  int64_t k = job.linear->k, steps = job.steps();
  for (int row = row0; row < row1; ++row) {
    const char* from = (const char*)job.x + row * job.x_stride * 2;
    char* to = (char*)scratch + row / 16 * steps * 1024 + row % 16 * 64;
    for (int64_t step = 0; step < k / kStep; ++step) memcpy(to + step * 1024, from + step * 64, 64);
    if (int64_t rest = k % kStep) {
      char* last = to + (steps - 1) * 1024;
      memcpy(last, from + (steps - 1) * 64, rest * 2);
      memset(last + rest * 2, 0, 64 - rest * 2);
    }
  }
}

void linear_run_bf16(const LinearJob& job, const void* scratch, const Share& share) {
  alignas(64) float c[32 * kPanel];
  int64_t steps = job.steps();
  for (int row = share.row0; row < share.row1; row += 32) {
    int rows = share.row1 - row < 32 ? share.row1 - row : 32;
    const char* x = (const char*)scratch + row / 16 * steps * 1024;
    configure(rows < 16 ? rows : 16, rows - 16 > 0 ? rows - 16 : 0);
    for (int panel = share.panel0; panel < share.panel1; ++panel) {
      if (rows > 16)
        block<2>(x, steps * 1024, job.panel(panel), steps, c);
      else
        block<1>(x, steps * 1024, job.panel(panel), steps, c);
      linear_store(job, c, kPanel, row, rows, panel);
    }
  }
  _tile_release();
}

}  // namespace mm

#endif
