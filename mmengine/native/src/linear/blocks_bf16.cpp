// Multiplies bfloat16 rows with a panel of blocks, with AVX-512's bfloat16 and VBMI. Every path sums over k in the same
// order, so a row's result has the same bits in any batch.
#include "linear/blocks.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

#include "linear/block.h"
#include "linear/blocks_bf16.h"

namespace mm {
namespace {

constexpr int kFirstRows = 4;    // most rows whose sums fit into registers beside a decoder
constexpr int kTileRows = 6;     // most rows whose sums fit into registers if numbers are read from memory
constexpr int kPiece = 256;      // values of k whose decoded numbers fit into the L1 cache
constexpr int kLeastGroup = 16;  // the smallest group, in values of k

// Decoded numbers in the layout of a bfloat16 panel, and the scales of their groups.
struct Tile {
  alignas(64) char numbers[kPiece * 64];
  Scales by[kPiece / kLeastGroup];
};

// Returns each row's sums of x over the groups from value t of k on, or NULL for a type without minimums.
template <int TYPE>
const float* sums_at(const Rows& rows, int64_t t) {
  constexpr BlockForm F = block_form(TYPE);
  if (F.heads < 4) return nullptr;
  return rows.sums + t / F.group + (F.group == 16 ? rows.linear.k / 32 : 0);
}

// Multiplies M rows with a group that begins with pair FIRST of a step.
template <int TYPE, int FIRST, bool TILE, int M, int... PAIR>
MM_INLINE void multiply_group(const PairDecoder<TYPE>& decoder, const Scratch* x, int64_t stride, const char* words,
                              char* numbers, __m512 (&sums)[M][2], std::integer_sequence<int, PAIR...>) {
  const auto one = [&](auto pair) {
    const __m512i low = decoder.template pair<pair()>(words), high = decoder.template pair<pair()>(words + 64);
    add_pair<M>(x + 2 * pair(), stride, low, high, sums);
    if constexpr (TILE) {
      store_as(numbers + pair() * 128, low);
      store_as(numbers + pair() * 128 + 64, high);
    }
  };
  (one(std::integral_constant<int, FIRST + PAIR>()), ...);
}

// Multiplies M rows with whole blocks of a panel, for the values [t, t + count) of k. TILE: also stores the decoded
// numbers and their scales to `tile`.
template <int TYPE, int M, bool TILE>
void multiply_first(const Rows& rows, const char* panel, int64_t t, int64_t count, Tile* tile, float* c) {
  static constexpr BlockForm F = block_form(TYPE);
  constexpr auto pairs = std::make_integer_sequence<int, F.group / 2>();
  const PairDecoder<TYPE> decoder;
  const Scratch* x = rows.x + t;
  const float* group_sums = sums_at<TYPE>(rows, t);
  const bool amd = kIsAmd;
  char* numbers = TILE ? tile->numbers : nullptr;
  Scales* by_group = TILE ? tile->by : nullptr;
  __m512 totals[M][2];
  begin_sums<M>(false, c, totals);
  panel += t / F.span * F.block_bytes();
  for (int64_t end = t + count; t < end; t += F.span, panel += F.block_bytes()) {
    const Heads<TYPE> heads(panel);
    const char* step = panel + F.heads * 32;
    for (int at = 0; at < F.span; at += 32, step += F.step_bytes(), x += 32) {
      const auto group = [&](auto first) {
        constexpr int index = first() * 2 / F.group;
        const Scales by = heads.scales(step + index * F.scale_bytes * 32);
        __m512 sums[M][2] = {};
        multiply_group<TYPE, first(), TILE>(decoder, x, rows.stride, step + F.step_scales(), numbers, sums, pairs);
        add_totals<M>(sums, by, F.heads == 4 ? group_sums++ : nullptr, rows.groups, totals);
        if constexpr (TILE) *by_group++ = by;
      };
      for (int line = 0; line < F.step_bytes(); line += 64) fetch_line<(M > kUnfetchedCodes)>(amd, step + line);
      group(std::integral_constant<int, 0>());
      if constexpr (F.group == 16) group(std::integral_constant<int, 8>());
      if constexpr (TILE) numbers += 2048;
    }
  }
  store_sums<M>(totals, c);
}

// The input for a tile: the rows' values of k, and their sums of x over the tile's groups.
struct TileRows {
  const Scratch* x;
  int64_t stride;
  const float* sums;
  int groups;
};

// c [M, 32] += x * a tile of `count` groups.
template <int M, int GROUP>
void multiply_tile(const TileRows& rows, const Tile& tile, int64_t count, float* c) {
  const Scratch* x = rows.x;
  const char* numbers = tile.numbers;
  __m512 totals[M][2];
  begin_sums<M>(false, c, totals);
  for (int64_t i = 0; i < count; ++i, numbers += GROUP * 64, x += GROUP) {
    __m512 sums[M][2] = {};
#pragma GCC unroll 2
    for (int pair = 0; pair < GROUP / 2; ++pair) {
      const char* at = numbers + pair * 128;
      add_pair<M>(x + 2 * pair, rows.stride, load_as<__m512i>(at), load_as<__m512i>(at + 64), sums);
    }
    add_totals<M>(sums, tile.by[i], rows.sums ? rows.sums + i : nullptr, rows.groups, totals);
  }
  store_sums<M>(totals, c);
}

template <int TYPE>
struct MultiplyPanel {
  static constexpr BlockForm F = block_form(TYPE);

  static void run(const Rows& rows, const char* panel, float* c) {
    constexpr decltype(&multiply_first<TYPE, 1, false>) few[] = {
        nullptr, multiply_first<TYPE, 1, false>, multiply_first<TYPE, 2, false>, multiply_first<TYPE, 3, false>,
        multiply_first<TYPE, 4, false>};
    const int64_t k = rows.linear.k;
    if (rows.count <= kFirstRows) return few[rows.count](rows, panel, 0, k, nullptr, c);
    Tile tile;
    for (int64_t t = 0; t < k; t += kPiece) {
      const int64_t count = k - t < kPiece ? k - t : kPiece;
      multiply_first<TYPE, kFirstRows, true>(rows, panel, t, count, &tile, c);
      multiply_others(rows, t, count, tile, c + kFirstRows * kPanel);
    }
  }

  // Multiplies the rows after the first kFirstRows rows with a tile.
  static void multiply_others(const Rows& rows, int64_t t, int64_t count, const Tile& tile, float* c) {
    constexpr decltype(&multiply_tile<1, F.group>) others[] = {
        nullptr,
        multiply_tile<1, F.group>,
        multiply_tile<2, F.group>,
        multiply_tile<3, F.group>,
        multiply_tile<4, F.group>,
        multiply_tile<5, F.group>,
        multiply_tile<kTileRows, F.group>};
    const int tall = height_of(rows.count - kFirstRows, kTileRows);
    const float* sums = sums_at<TYPE>(rows, t);
    for (int row = kFirstRows; row < rows.count; row += tall, c += tall * kPanel) {
      const int height = rows.count - row < tall ? rows.count - row : tall;
      const TileRows some = {rows.x + row * rows.stride + t, rows.stride,
                             sums ? sums + (int64_t)row * rows.groups : nullptr, rows.groups};
      others[height](some, tile, count / F.group, c);
    }
  }
};

}  // namespace

void run_block_panel(int type, const Rows& rows, const char* panel, float* c) {
  memset(c, 0, rows.count * kPanel * sizeof(float));
  for_block_type<MultiplyPanel, const Rows&>(type, rows, panel, c);
}

}  // namespace mm

#endif
