// Multiplies rows of x with a panel (32 columns of the weights) with AVX2. For more than one row, codes are first
// decoded to bfloat16 pairs. Every path sums over k in order, so a row's result has the same bits in any batch.
#include "linear/codes.h"
#include "linear/rows.h"

#if !defined(__AVX512F__)

#include "linear/codes_avx2.h"

namespace mm {
namespace {

constexpr int kPiece = 256;  // values of k in each pass over the rows; their weights fit into the L1 cache
constexpr int kTall = 4;     // most rows whose sums with half a panel fit into registers
constexpr int kFew = 2;      // most rows whose sums with a whole panel fit into registers

// Prefetches 128 bytes of codes, also beyond the end of a page, where the CPU's prefetchers stop.
MM_INLINE void fetch_codes_ahead(const char* codes) {
  fetch_ahead<8192, 1024>(codes);
  fetch_ahead<8192, 1024>(codes + 64);
}

// Factors applied after the product with a group: scales [32], and mins [32] or NULL. Mins multiply `sums`, each row's
// sum of x over the group. `groups`: the stride between rows in `sums`.
struct Behind {
  const float *scales, *mins, *sums;
  int groups;

  // Adds the scaled sums to totals [M][8 * V], from `column` of the panel on.
  template <int M, int V>
  MM_INLINE_MEMBER void add(const __m256 (&found)[M][V], int column, int row, __m256 (&totals)[M][V]) const {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const __m256 scale = load_as<__m256>(scales + column + v * 8);
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) totals[i][v] = _mm256_fmadd_ps(found[i][v], scale, totals[i][v]);
    }
    if (!mins) return;
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) {
      const __m256 sum = _mm256_broadcast_ss(sums + (int64_t)(row + i) * groups);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        totals[i][v] = _mm256_fmadd_ps(sum, load_as<__m256>(mins + column + v * 8), totals[i][v]);
    }
  }
};

template <int M, int V>
MM_INLINE void load_rows(const float* c, __m256 (&rows)[M][V]) {
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) rows[i][v] = load_as<__m256>(c + i * kPanel + v * 8);
}

template <int M, int V>
MM_INLINE void store_rows(const __m256 (&rows)[M][V], float* c) {
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store_as(c + i * kPanel + v * 8, rows[i][v]);
}

// The weights to multiply: w has 128 bytes for each pair of k, in `groups` groups with `pairs` pairs each. `behind` has
// each group's factors, or is NULL for a single unscaled group. Sums are added to c; unscaled sums replace c if
// `first`.
struct Weights {
  const char* w;
  int64_t pairs;
  bool first;
  int groups;
  const Behind* behind;
};

// Multiplies x [M, k] with 8 * V columns, from `column` of the panel on. The rows of c have a stride of 32.
template <int M, int V>
void multiply(const Scratch* x, int64_t x_stride, const Weights& weights, int column, int row, float* c) {
  const char* w = weights.w + column * 4;
  for (int group = 0; group < weights.groups; ++group) {
    __m256 sums[M][V] = {};
    if (!weights.first && !weights.behind) load_rows(c, sums);
    for (int64_t pair = 0; pair < weights.pairs; ++pair, w += 128, x += 2) {
#pragma GCC unroll 2
      for (int t = 0; t < 2; ++t) {
        __m256 each[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
          each[v] = t ? odd_of(load_as<__m256i>(w + v * 32)) : even_of(load_as<__m256i>(w + v * 32));
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) {
          const __m256 a = _mm256_broadcast_ss(x + i * x_stride + t);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[i][v] = _mm256_fmadd_ps(a, each[v], sums[i][v]);
        }
      }
    }
    if (!weights.behind) return store_rows(sums, c);
    __m256 totals[M][V];
    load_rows(c, totals);
    weights.behind[group].add(sums, column, row, totals);
    store_rows(totals, c);
  }
}

constexpr decltype(&multiply<1, 4>) kWhole[] = {nullptr, multiply<1, 4>, multiply<2, 4>};
constexpr decltype(&multiply<1, 2>) kHalf[] = {nullptr, multiply<1, 2>, multiply<2, 2>, multiply<3, 2>, multiply<4, 2>};

// Multiplies all rows with weights that begin at position t of k.
void run_pairs(const Rows& rows, int64_t t, const Weights& weights, float* c) {
  if (rows.count <= kFew) return kWhole[rows.count](rows.x + t, rows.stride, weights, 0, 0, c);
  const int tall = height_of(rows.count, kTall);
  for (int row = 0; row < rows.count; row += tall) {
    const Rows some = rows.some(row, tall);
    for (int half = 0; half < 2; ++half)
      kHalf[some.count](some.x + t, some.stride, weights, half * 16, row, c + row * kPanel + half * 16);
  }
}

void run_plain(const Rows& rows, const char* panel, float* c) {
  const int64_t k = linear_steps(rows.linear) * kStep, most = rows.count <= kFew ? k : kPiece;
  for (int64_t t = 0; t < k; t += most)
    run_pairs(rows, t, {panel + t * 64, (k - t < most ? k - t : most) / 2, t == 0, 1, nullptr}, c);
}

// Decodes values [from, to) of a group's codes to pairs, in the layout of a bfloat16 panel.
template <bool EXACT, class Codes>
MM_INLINE void decode_some(const Codes& codes, const char* at, int from, int to, char* tile) {
  at += from / Codes::kDeep * 128, tile += from * 64;
  for (int t = from; t < to; t += Codes::kDeep, at += 128, tile += Codes::kDeep * 64) {
    fetch_codes_ahead(at);
    codes.template lines<EXACT>(at, tile);
  }
}

template <class Codes>
void decode(const mm_linear& linear, const char* group, char* tile) {
  const Codes codes(linear, group);
  const char* at = group + codes_at(linear);
  for (int t = 0; t < linear.group;) {
    const int known = codes.known_until(t);
    decode_some<false>(codes, at, t, known, tile);
    if (known == linear.group) break;
    t = codes.odd_until(known);
    decode_some<true>(codes, at, known, t, tile);
  }
}

// A group's scales and mins as float32. For int4, the mins include the codes' offset 8.
struct Shared {
  alignas(32) float scales[kPanel], mins[kPanel];

  Shared() = default;
  MM_INLINE_MEMBER Shared(const mm_linear& linear, const char* group) {
    for (int eight = 0; eight < 4; ++eight) {
      const __m256 scale = _mm256_cvtph_ps(load_as<__m128i>(group + eight * 16));
      store_as(scales + eight * 8, scale);
      if (!wants_sums(linear)) continue;
      __m256 min = linear.mins ? load_as<__m256>(group + mins_at(linear) + eight * 32) : _mm256_setzero_ps();
      if (is_masked(linear)) min = _mm256_fnmadd_ps(scale, _mm256_set1_ps(8), min);
      store_as(mins + eight * 8, min);
    }
  }
  MM_INLINE_MEMBER Behind behind(const Rows& rows, int i) const {
    return {scales, wants_sums(rows.linear) ? mins : nullptr, rows.sums + i, rows.groups};
  }
};

// Decodes kPiece values of k at a time and multiplies all rows with them.
template <class Codes>
void run_many(const Rows& rows, const char* group, float* c) {
  const mm_linear& linear = rows.linear;
  alignas(64) char tile[kPiece * 64];
  Shared shared[kPiece / 32];
  Behind behind[kPiece / 32];
  const int size = linear.group, most = kPiece / size;
  for (int i = 0; i < rows.groups; i += most) {
    const int count = rows.groups - i < most ? rows.groups - i : most;
    for (int g = 0; g < count; ++g, group += group_bytes(linear)) {
      decode<Codes>(linear, group, tile + g * size * 64);
      if constexpr (!Codes::kScaled) shared[g] = Shared(linear, group), behind[g] = shared[g].behind(rows, i + g);
    }
    if constexpr (Codes::kScaled)
      run_pairs(rows, (int64_t)i * size, {tile, count * size / 2, i == 0, 1, nullptr}, c);
    else
      run_pairs(rows, (int64_t)i * size, {tile, size / 2, false, count, behind}, c);
  }
}

template <bool EXACT, class Codes>
MM_INLINE void add_some(const Codes& codes, const Scratch* x, const char* at, int from, int to, __m256 (&sums)[4]) {
  __m256 found[4] = {sums[0], sums[1], sums[2], sums[3]};  // a local copy stays in registers; `sums` may not
  at += from / Codes::kDeep * 128;
  for (int t = from; t < to; t += Codes::kDeep, at += 128) {
    fetch_codes_ahead(at);
    codes.template add<EXACT>(at, x + t, found);
  }
  for (int eight = 0; eight < 4; ++eight) sums[eight] = found[eight];
}

template <class Codes>
__attribute__((noinline)) void add_odd(const Codes& codes, const Scratch* x, const char* at, int from, int to,
                                       __m256 (&sums)[4]) {
  add_some<true>(codes, x, at, from, to, sums);
}

// Multiplies a single row, with codes decoded in registers.
template <class Codes>
void run_alone(const Rows& rows, const char* group, float* c) {
  const mm_linear& linear = rows.linear;
  __m256 sums[1][4] = {}, totals[1][4] = {};
  const Scratch* x = rows.x;
  for (int i = 0; i < rows.groups; ++i, group += group_bytes(linear), x += linear.group) {
    const Codes codes(linear, group);
    const char* at = group + codes_at(linear);
    for (int t = 0; t < linear.group;) {
      const int known = codes.known_until(t);
      add_some<false>(codes, x, at, t, known, sums[0]);
      if (known == linear.group) break;
      t = codes.odd_until(known);
      add_odd(codes, x, at, known, t, sums[0]);
    }
    if constexpr (Codes::kScaled) continue;
    Codes::ordered(sums[0]);
    const Shared shared(linear, group);
    shared.behind(rows, i).add(sums, 0, 0, totals);
    for (__m256& sum : sums[0]) sum = _mm256_setzero_ps();
  }
  store_rows(Codes::kScaled ? sums : totals, c);
}

template <class Codes>
void run_codes(const Rows& rows, const char* panel, float* c) {
  if (rows.alone) return run_alone<Codes>(rows, panel, c);
  memset(c, 0, rows.count * kPanel * sizeof(float));
  run_many<Codes>(rows, panel, c);
}

}  // namespace

void run_panels(int, const Rows& rows, const char* panel, float* c) {
  if (!rows.linear.group) return run_plain(rows, panel, c);
  if (rows.linear.form == MM_FP8) return run_codes<Fp8Codes>(rows, panel, c);
  if (rows.linear.form == MM_INT8) return run_codes<Int8Codes>(rows, panel, c);
  run_codes<Int4Codes>(rows, panel, c);
}

}  // namespace mm

#endif
