// bfloat16 with AMX: tiles of 16 rows of x by 16 columns of w, 32 values of k at a time.
#include "linear/blocks_amx.h"
#include "linear/codes_amx.h"
#include "linear/int8.h"
#include "linear/job.h"

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

// Configures the tile registers: 0 to 3 hold sums (for two row tiles and two halves of a panel), 4 and 5 hold x, 6 and
// 7 hold weights.
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

// Stores decoded steps consecutively.
struct Whole {
  char* to;

  MM_INLINE_MEMBER char* room() const { return to; }
  MM_INLINE_MEMBER void decoded() { to += 2048; }
};

// The product of one block: rows of x in one or two row tiles with one panel, over `steps` steps of k.
struct Block {
  const char* x;   // consecutive tiles along k
  int64_t x_tile;  // bytes between row tiles
  const char* w;
  int64_t steps;
  float* sums;        // [16 or 32, kPanel]
  const char* ahead;  // weights to prefetch meanwhile, `lines` cache lines per step
  int lines;
};

template <int TILES>
MM_INLINE void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TILES == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int TILES>
MM_INLINE void load_tiles(const float* sums) {
  constexpr int64_t pitch = kPanel * sizeof(float);
  _tile_loadd(0, sums, pitch);
  _tile_loadd(1, sums + 16, pitch);
  if constexpr (TILES == 2) {
    _tile_loadd(2, sums + 16 * kPanel, pitch);
    _tile_loadd(3, sums + 16 * kPanel + 16, pitch);
  }
}

template <int TILES>
MM_INLINE void store_tiles(float* sums) {
  constexpr int64_t pitch = kPanel * sizeof(float);
  _tile_stored(0, sums, pitch);
  _tile_stored(1, sums + 16, pitch);
  if constexpr (TILES == 2) {
    _tile_stored(2, sums + 16 * kPanel, pitch);
    _tile_stored(3, sums + 16 * kPanel + 16, pitch);
  }
}

// Adds `steps` steps to the sums.
template <int TILES, bool NEAR>
MM_INLINE void add_steps(const Block& b) {
  const char *x = b.x, *w = b.w, *ahead = b.ahead;
  asm volatile("" ::: "memory");  // stores that tile loads depend on must come first
  for (int64_t step = 0; step < b.steps; ++step, x += 1024, w += 2048) {
    _tile_loadd(6, w, 128);
    _tile_loadd(4, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    for (int i = 0; i < b.lines; ++i, ahead += 64) _mm_prefetch(ahead, NEAR ? _MM_HINT_T0 : _MM_HINT_T1);
    _tile_loadd(7, w + 64, 128);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TILES == 2) {
      _tile_loadd(5, x + b.x_tile, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <int TILES, bool FIRST, bool NEAR>
void multiply(const Block& b) {
  if constexpr (FIRST)
    zero_tiles<TILES>();
  else
    load_tiles<TILES>(b.sums);
  add_steps<TILES, NEAR>(b);
  store_tiles<TILES>(b.sums);
}

// For up to 32 rows and quantised weights: while one step is decoded into the first-level cache, the tiles multiply the
// previous step.
template <int TILES>
struct Turns {
  const char* x;
  int64_t x_tile;
  char* rooms;  // two steps
  int64_t step = 0;

  MM_INLINE_MEMBER char* room() const { return rooms + step % 2 * 2048; }

  MM_INLINE_MEMBER void decoded() {
    if (step) multiply_last();
    ++step;
  }

  MM_INLINE_MEMBER void multiply_last() const {
    const char* w = rooms + (step - 1) % 2 * 2048;
    add_steps<TILES, true>({x + (step - 1) * 1024, x_tile, w, 1, nullptr, w, 0});
  }
};

template <int TILES>
void run_few_codes(const LinearJob& job, const char* x, int row0, int rows, const Share& share) {
  alignas(64) float sums[32 * kPanel];
  const mm_linear& linear = *job.linear;
  for (int panel = share.panel0; panel < share.panel1; ++panel) {
    const char* from = job.panel(panel);
    Turns<TILES> turns = {x, job.steps() * 1024, share.room};
    zero_tiles<TILES>();
    if (linear.form == MM_BLOCKS) decode_blocks(block_type_of(linear, panel), from, 0, job.steps(), turns);
    for (int group = 0; group < job.groups(); ++group, from += group_bytes(linear)) decode_group(linear, from, turns);
    turns.multiply_last();
    store_tiles<TILES>(sums);
    linear_store(job, sums, kPanel, row0, rows, panel);
  }
}

// For up to 32 rows and bfloat16 weights. Reading the weights from memory limits the speed, so they are read once, and
// prefetched 8 KB ahead, also across panels: each panel directly follows the previous one.
void run_few(const LinearJob& job, const char* x, int row0, int rows, const Share& share) {
  alignas(64) float sums[32 * kPanel];
  const int64_t steps = job.steps();
  for (int panel = share.panel0; panel < share.panel1; ++panel) {
    const char* w = job.panel(panel);
    Block block = {x, steps * 1024, w, steps, sums, w + 8192, 32};
    (rows > 16 ? multiply<2, true, true> : multiply<1, true, true>)(block);
    linear_store(job, sums, kPanel, row0, rows, panel);
  }
}

// For more rows: x stays in the second-level cache for all panels. A piece of kPiece steps of a panel stays in the
// first-level cache for all rows; between pieces the rows' sums are in `sums`. Meanwhile the next panel is prefetched
// into the second-level cache, a share with each block of rows. Codes are decoded one piece at a time.
constexpr int kPiece = 8;
constexpr int kMostRows = 512;

bool is_decoded(const mm_linear& linear) { return linear.group || linear.form == MM_BLOCKS; }

// Returns the number of steps in a piece: kPiece, rounded down to whole groups of codes.
int64_t piece_steps(const mm_linear& linear) {
  const int64_t of_group = linear.group ? linear.group / kStep : 1;
  return kPiece / of_group * of_group;
}

// Returns `steps` steps of a panel from `step` on; codes and blocks are decoded to `room`.
const char* weights(const LinearJob& job, int index, int64_t step, int64_t steps, char* room) {
  const mm_linear& linear = *job.linear;
  const char* panel = job.panel(index);
  if (!is_decoded(linear)) return panel + step * 2048;
  Whole whole = {room};
  if (linear.form == MM_BLOCKS) {
    decode_blocks(block_type_of(linear, index), panel, step, step + steps, whole);
    return room;
  }
  const int64_t steps_of_group = linear.group / kStep;
  const char* group = panel + step / steps_of_group * group_bytes(linear);
  for (int64_t done = 0; done < steps; done += steps_of_group, group += group_bytes(linear))
    decode_group(linear, group, whole);
  return room;
}

void run_many(const LinearJob& job, const char* x, int row0, int rows, const Share& share) {
  alignas(64) float sums[kMostRows * kPanel];
  int64_t steps = job.steps(), most = piece_steps(*job.linear);
  int blocks = (int)ceil_div(rows, 32), lines = is_decoded(*job.linear) ? 0 : (int)ceil_div(32, blocks);  // decoders prefetch
  configure(16, 16);
  for (int panel = share.panel0; panel < share.panel1; ++panel) {
    const char* next = job.panel(panel + 1);
    for (int64_t step = 0; step < steps; step += most) {
      int64_t piece = steps - step < most ? steps - step : most;
      const char* w = weights(job, panel, step, piece, share.room);
      for (int i = 0; i < blocks; ++i) {
        int left = rows - i * 32 < 32 ? rows - i * 32 : 32;
        Block block = {x + (i * 2 * steps + step) * 1024,      steps * 1024, w, piece, sums + i * 32 * kPanel,
                       next + (i * steps + step) * lines * 64, lines};
        if (step == 0)
          (left > 16 ? multiply<2, true, false> : multiply<1, true, false>)(block);
        else
          (left > 16 ? multiply<2, false, false> : multiply<1, false, false>)(block);
        if (step + piece == steps) linear_store(job, block.sums, kPanel, row0 + i * 32, left, panel);
      }
    }
  }
}

}  // namespace

int64_t linear_scratch_bytes(const LinearJob& job) {
  if (job.linear->x_form) return int8_scratch_bytes(job);
  return ceil_div(job.m, 16) * job.steps() * 1024;
}

int64_t linear_thread_bytes(const LinearJob& job) {
  return is_decoded(*job.linear) ? piece_steps(*job.linear) * 2048 : 0;
}

void linear_prepare(const LinearJob& job, void* scratch, int row0, int row1) {
  if (job.linear->x_form) return int8_prepare(job, scratch, row0, row1);
  int64_t k = job.linear->k, steps = job.steps();
  for (int row = row0; row < row1; ++row) {
    const char* from = job.row(row);
    char* to = (char*)scratch + row / 16 * steps * 1024 + row % 16 * 64;
    int64_t whole = k / kStep;
    for (int64_t step = 0; step < whole; ++step) memcpy(to + step * 1024, from + step * 64, 64);
    for (int64_t step = whole; step < steps; ++step) memset(to + step * 1024, 0, 64);
    if (int64_t rest = k % kStep) memcpy(to + whole * 1024, from + whole * 64, rest * 2);
  }
}

void linear_run_bf16(const LinearJob& job, const void* scratch, const Share& share) {
  if (job.linear->x_form) return int8_run(job, scratch, share);
  int64_t steps = job.steps(), fit = (3 << 19) / (steps * 64) / 32 * 32;  // rows of x in 1.5 MB
  int most = (int)(fit < 32 ? 32 : fit < kMostRows ? fit : kMostRows);
  for (int row = share.row0; row < share.row1; row += most) {
    int rows = share.row1 - row < most ? share.row1 - row : most;
    const char* x = (const char*)scratch + row / 16 * steps * 1024;
    if (rows > 32) {
      run_many(job, x, row, rows, share);
      continue;
    }
    configure(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 0);
    const auto few = !is_decoded(*job.linear) ? run_few : rows > 16 ? run_few_codes<2> : run_few_codes<1>;
    few(job, x, row, rows, share);
  }
  _tile_release();
}

}  // namespace mm

#endif
