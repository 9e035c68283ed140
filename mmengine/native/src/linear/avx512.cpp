// Multiplies rows of x with a panel (32 columns of the weights) with AVX-512.
#include <type_traits>

#if defined(__AVX512F__) && !defined(__AMX_BF16__)

#include "linear/block.h"

namespace mm {
namespace {

// c [16] += sums * scales, plus group_sum * mins if there are mins. `group_sum`: a row's sum of x over the group.
MM_INLINE void add_scaled(f16v sums, const Scales& by, int half, const float* group_sum, float* c) {
  f16v found = fused(sums, by.scales[half], load_as<f16v>(c + half * 16));
  if (group_sum) found = fused(splat(*group_sum), by.mins[half], found);
  store_as(c + half * 16, found);
}

template <int M>
void multiply_some(const Rows& rows, int64_t t, const char* w, int64_t steps, bool first, float* c) {
  multiply<M>(rows.x + t, rows.stride, w, steps, first, c);
}

constexpr int kScaledRows = 6;  // most rows for which a group's sums and the totals fit into registers
constexpr int kPiece = 256;     // values of k that are decoded at a time for many rows

// Multiplies M rows with `count` groups from `first` on, whose decoded codes are in `tile`.
template <int M>
void multiply_tile(const Rows& rows, int first, int count, const char* tile, const Scales* by, Next next, float* c) {
  const int size = rows.linear.group;
  multiply_scaled<M>(rows.x + (int64_t)first * size, rows.stride, tile, size, by, count,
                     rows.linear.mins ? rows.sums + first : nullptr, rows.groups, next, c);
}

#if defined(__AVX512BF16__)
// c [M, 32] += scaled sums of group i.
template <int M>
MM_INLINE void add_group(const Rows& rows, int i, const char* group, const __m512 (&sums)[M][2], float* c) {
  const Scales by(rows.linear, group);
#pragma GCC unroll 16
  for (int row = 0; row < M; ++row)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      add_scaled((f16v)sums[row][half], by, half, rows.linear.mins ? rows.sums + row * rows.groups + i : nullptr,
                 c + row * kPanel);
}

// Decodes a group in registers and multiplies M rows. TILE: also stores the decoded weights to `tile`. FP8 weights are
// scaled before the product, so their sums start from c.
template <class Codes, int M, bool TILE>
MM_INLINE void multiply_group(const Rows& rows, int i, const char* group, char* tile, float* c) {
  const mm_linear& linear = rows.linear;
  constexpr bool is_scaled = std::is_same_v<Codes, Fp8Codes>;
  __m512 sums[M][2];
  begin_sums<M>(!is_scaled || i == 0, c, sums);
  multiply_codes<Codes, M, TILE>(Codes(group), rows.x + (int64_t)i * linear.group, rows.stride,
                                 group + placed(linear, codes_at(linear)), linear.group, tile, sums);
  if constexpr (is_scaled)
    store_sums<M>(sums, c);
  else
    add_group<M>(rows, i, group, sums, c);
}

// Multiplies few rows with all groups of a panel.
template <class Codes, int M>
void multiply_panel(const Rows& rows, const char* group, char* tile, float* c) {
  const mm_linear& linear = rows.linear;
  for (int i = 0; i < rows.groups; ++i, group += group_step(linear)) {
    if (Codes::fit(group)) {
      multiply_group<Codes, M, false>(rows, i, group, nullptr, c);
    } else {
      decode_weights(linear, group, tile);
      multiply_some<M>(rows, (int64_t)i * linear.group, tile, linear.group / kStep, i == 0, c);
    }
  }
}

// Multiplies few rows with two int4 panels whose cache lines alternate.
template <int M>
void multiply_pair(const Rows& rows, const char* group, float* c) {
  const mm_linear& linear = rows.linear;
  const bool amd = kIsAmd;
  for (int i = 0; i < rows.groups; ++i, group += group_step(linear)) {
    const Int4Codes found(group);
    const char* codes = group + placed(linear, codes_at(linear));
    const Scratch* x = rows.x + (int64_t)i * linear.group;
    __m512 sums[2][M][2] = {};
    for (int t = 0; t < linear.group; t += 4, codes += Int4Codes::kNext, x += 4)
#pragma GCC unroll 2
      for (int panel = 0; panel < 2; ++panel) {
        __m512i low[2], high[2];
        fetch_line<(M > 1), 2 * kAhead>(amd, codes + panel * 64);
        found.pairs(codes + panel * 64, low, high);
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; ++pair) add_pair<M>(x + 2 * pair, rows.stride, low[pair], high[pair], sums[panel]);
      }
#pragma GCC unroll 2
    for (int panel = 0; panel < 2; ++panel)
      add_group<M>(rows, i, group + panel * 64, sums[panel], c + panel * M * kPanel);
  }
}

constexpr int kDecodedRows = 4;  // most rows whose sums fit into registers beside codes
constexpr int kFirstRows = 8;    // most rows that are multiplied while FP8 codes are decoded and scaled

// Decodes groups [first, first + count) in registers and multiplies M rows with them. Stores the decoded codes to
// `tile` and their scales to `by`.
template <class Codes, int M>
void multiply_groups(const Rows& rows, int first, int count, const char* group, char* tile, Scales* by, float* c) {
  const mm_linear& linear = rows.linear;
  const Codes found(group);
  __m512 totals[M][2];
  begin_sums<M>(false, c, totals);
  for (int i = 0; i < count; ++i, group += group_step(linear)) {
    by[i] = Scales(linear, group);
    __m512 sums[M][2] = {};
    multiply_codes<Codes, M, true>(found, rows.x + (int64_t)(first + i) * linear.group, rows.stride,
                                   group + placed(linear, codes_at(linear)), linear.group,
                                   tile + (int64_t)i * linear.group * 64, sums);
    add_totals<M>(sums, by[i], linear.mins ? rows.sums + first + i : nullptr, rows.groups, totals);
  }
  store_sums<M>(totals, c);
}

// Like multiply_tile, for FP8 codes, which are already scaled in `tile`.
template <int M>
void multiply_scaled_tile(const Rows& rows, int first, int count, const char* tile, Next next, float* c) {
  const int size = rows.linear.group;
  multiply<M>(rows.x + (int64_t)first * size, rows.stride, tile, (int64_t)count * size / kStep, false, c, next);
}
#endif

#if !defined(__AVX512BF16__)
// Multiplies few rows with all groups of a panel.
template <class Codes, int M>
void multiply_panel(const Rows& rows, const char* group, char*, float* c) {
  const mm_linear& linear = rows.linear;
  constexpr bool is_scaled = std::is_same_v<Codes, Fp8Codes>;
  alignas(64) float part[M * kPanel];
  for (int i = 0; i < rows.groups; ++i, group += group_bytes(linear)) {
    const Scales by(linear, group);
    float* to = is_scaled ? c : part;
    for (int column = 0; column < kPanel; column += kWide) {
      columns sums[M][2] = {}, scales[2];
      for (int v = 0; v < 2; ++v) {
        scales[v] = load_as<columns>((const float*)by.scales + column + v * kColumns);
        for (int row = 0; row < M && is_scaled; ++row)  // c was zeroed by the caller
          sums[row][v] = load_as<columns>(c + row * kPanel + column + v * kColumns);
      }
      multiply_codes<Codes, M>(rows.x + (int64_t)i * linear.group, rows.stride, group + codes_at(linear) + column,
                               linear.group, scales, sums);
#pragma GCC unroll 16
      for (int row = 0; row < M; ++row)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) store_as(to + row * kPanel + column + v * kColumns, sums[row][v]);
    }
    for (int row = 0; row < M && !is_scaled; ++row)
      for (int half = 0; half < 2; ++half)
        add_scaled(load_as<f16v>(part + row * kPanel + half * 16), by, half,
                   linear.mins ? rows.sums + row * rows.groups + i : nullptr, c + row * kPanel);
  }
}
#endif

template <int... M>
struct Blocks {
  static constexpr decltype(&multiply_some<1>) plain[] = {nullptr, multiply_some<M>...};
  static constexpr decltype(&multiply_tile<1>) tile[] = {nullptr, multiply_tile<M>...};
  template <class Codes>
  struct Of {
    static constexpr decltype(&multiply_panel<Codes, 1>) panel[] = {nullptr, multiply_panel<Codes, M>...};
  };
#if defined(__AVX512BF16__)
  static constexpr decltype(&multiply_group<Fp8Codes, 1, true>) fp8[] = {nullptr, multiply_group<Fp8Codes, M, true>...};
  static constexpr decltype(&multiply_scaled_tile<1>) steps[] = {nullptr, multiply_scaled_tile<M>...};
#endif
};
typedef Blocks<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12> All;

// Multiplies rows with `steps` steps (32 values of k each) of bfloat16 weights. `t`: where the first step begins in k.
void run_steps(const Rows& rows, int64_t t, const char* w, int64_t steps, float* c) {
  if (!rows.count) return;
  int tall = height_of(rows.count, kRows);
  for (int row = 0; row < rows.count; row += tall) {
    const Rows some = rows.some(row, tall);
    All::plain[some.count](some, t, w, steps, t == 0, c + row * kPanel);
  }
}

#if defined(__AVX512BF16__)
// Multiplies more than kRows rows with a panel of codes. Each pass decodes kPiece values of k and multiplies the first
// rows; the remaining rows then use the decoded values.
template <class Codes>
void run_many(const Rows& rows, const char* group, char* tile, float* c) {
  const mm_linear& linear = rows.linear;
  const int size = linear.group;
  const Rows first = rows.some(0, kDecodedRows), others = rows.some(kDecodedRows, rows.count);
  const int tall = height_of(others.count, kScaledRows);
  for (int i = 0; i < rows.groups; i += kPiece / size) {
    const int count = rows.groups - i < kPiece / size ? rows.groups - i : kPiece / size;
    Scales by[kPiece / 32];
    multiply_groups<Codes, kDecodedRows>(first, i, count, group, tile, by, c);
    group += count * group_step(linear);
    for (int row = 0; row < others.count; row += tall) {
      const Rows some = others.some(row, tall);
      const Next next = {row ? tile : group};
      All::tile[some.count](some, i, count, tile, by, next, c + (kDecodedRows + row) * kPanel);
    }
  }
}

// run_many for FP8, whose codes are scaled during decoding.
template <>
void run_many<Fp8Codes>(const Rows& rows, const char* group, char* tile, float* c) {
  const mm_linear& linear = rows.linear;
  const int size = linear.group, tall = height_of(rows.count, kFirstRows);
  const Rows first = rows.some(0, tall), others = rows.some(tall, rows.count);
  const int others_tall = height_of(others.count, kRows);
  for (int i = 0; i < rows.groups; i += kPiece / size) {
    const int count = rows.groups - i < kPiece / size ? rows.groups - i : kPiece / size;
    for (int g = 0; g < count; ++g, group += group_step(linear)) {
      char* to = tile + g * size * 64;
      if (Fp8Codes::fit(group)) {
        All::fp8[tall](first, i + g, group, to, c);
      } else {
        decode_weights(linear, group, to);
        run_steps(first, (int64_t)(i + g) * size, to, size / kStep, c);
      }
    }
    for (int row = 0; row < others.count; row += others_tall) {
      const Rows some = others.some(row, others_tall);
      const Next next = {row ? tile : group};
      All::steps[some.count](some, i, count, tile, next, c + (tall + row) * kPanel);
    }
  }
}

#else
// Multiplies more than kRows rows with a panel of codes, and decodes kPiece values of k at a time. The scales of
// integer codes are applied after the product.
template <class Codes>
void run_many(const Rows& rows, const char* group, char* tile, float* c) {
  const mm_linear& linear = rows.linear;
  const int size = linear.group, tall = height_of(rows.count, kScaledRows);
  for (int i = 0; i < rows.groups; i += kPiece / size) {
    const int count = rows.groups - i < kPiece / size ? rows.groups - i : kPiece / size;
    Scales by[kPiece / 32];
    for (int g = 0; g < count; ++g, group += group_bytes(linear)) {
      by[g] = Scales(linear, group);
      decode_codes(linear, group, tile + (int64_t)g * size * 64);
    }
    for (int row = 0; row < rows.count; row += tall) {
      const Rows some = rows.some(row, tall);
      All::tile[some.count](some, i, count, tile, by, Next{row ? tile : group}, c + row * kPanel);
    }
  }
}

// run_many for FP8, whose codes are scaled during decoding.
template <>
void run_many<Fp8Codes>(const Rows& rows, const char* group, char* tile, float* c) {
  const mm_linear& linear = rows.linear;
  for (int i = 0; i < rows.groups; ++i, group += group_bytes(linear)) {
    decode_weights(linear, group, tile);
    run_steps(rows, (int64_t)i * linear.group, tile, linear.group / kStep, c);
  }
}
#endif

template <class Codes>
void run_codes(const Rows& rows, const char* panel, char* tile, float* c) {
  if (rows.count <= kRows)
    All::Of<Codes>::panel[rows.count](rows, panel, tile, c);
  else
    run_many<Codes>(rows, panel, tile, c);
}

}  // namespace

void run_panels(int panels, const Rows& rows, const char* panel, float* c) {
  const mm_linear& linear = rows.linear;
  if (!linear.group) return run_steps(rows, 0, panel, linear_steps(linear), c);
  alignas(64) char tile[MM_MAX_GROUP * 64];
  memset(c, 0, panels * rows.count * kPanel * sizeof(float));
#if defined(__AVX512BF16__)
  constexpr decltype(&multiply_pair<1>) pairs[] = {
      nullptr,          multiply_pair<1>, multiply_pair<2>,        multiply_pair<3>,
      multiply_pair<4>, multiply_pair<5>, multiply_pair<kPairRows>};
  if (panels == 2) return pairs[rows.count](rows, panel, c);
#endif
  auto run = linear.form == MM_FP8    ? run_codes<Fp8Codes>
             : linear.form == MM_INT8 ? run_codes<Int8Codes>
                                      : run_codes<Int4Codes>;
  run(rows, panel, tile, c);
}

}  // namespace mm

#endif
