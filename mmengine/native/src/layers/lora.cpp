// LoRA additions. For each chunk of rows, x a^T is computed for all parts first, then the products with b. A part is
// an addition to a range of columns.
#include "layers/lora.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/fetch.h"
#include "common/row_vec.h"
#include "common/scratch.h"
#include "common/threads.h"
#include "linear/linear.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // multiply-adds below which a second thread costs more than it saves
constexpr int kLanes = 16;
constexpr int kRows = 4;          // rows that share each load of a and b
constexpr int kSums = 4;          // partial sums of a row over k, the same for any number of rows
#if defined(__AVX512F__)
constexpr int kInRegisters = 16;  // how many `Sixteen` sums fit into registers
#else
constexpr int kInRegisters = 4;
#endif
constexpr int kRowsOfChunk = 32;
constexpr int kFarAhead = 8192, kNearAhead = 2048;  // bytes, for the second-level and the first-level cache
#if defined(__AVX512F__)
constexpr int kPanels = 1;  // panels that are added to one row at once: 1, so that the loads form a single stream
const bool kFetchesForOne = !kIsAmd;  // whether to prefetch for one row; AMD's hardware prefetches a single stream better
#else
constexpr int kPanels = 4;  // hides the latency of additions
constexpr bool kFetchesForOne = true;
#endif
#if defined(__AVX512BF16__)
constexpr bool kDots = true;  // bfloat16 pairs are multiplied directly
#else
constexpr bool kDots = false;
#endif

// Returns how many pairs of neighbours `count` values form.
inline int pairs_of(int count) { return (count + 1) / 2; }
template <bool BF16>
constexpr int kPairBytes = kLanes * 2 * (BF16 ? 2 : 4);

// The type that a or b is multiplied with.
template <bool BF16>
using Factor = std::conditional_t<BF16 && kDots, uint16_t, float>;

// Sums of 16 neighbouring columns.
struct Sixteen {
  static constexpr int kParts = kLanes / kWide;
  wide part[kParts];

  MM_INLINE_MEMBER Sixteen operator+(const Sixteen& other) const {
    Sixteen sum = *this;
    for (int i = 0; i < kParts; ++i) sum.part[i] += other.part[i];
    return sum;
  }
};

// Loads a pair as float32.
template <bool BF16>
MM_INLINE void load_pair(const char* at, wide (&pair)[2][Sixteen::kParts]) {
#pragma GCC unroll 2
  for (int part = 0; part < Sixteen::kParts; ++part)
    if constexpr (BF16) {
      typedef uint32_t bits_of __attribute__((vector_size(sizeof(wide))));
      const bits_of both = load_as<bits_of>(at + part * sizeof(wide));
      pair[0][part] = (wide)(both << 16), pair[1][part] = (wide)(both & 0xffff0000u);
    } else {
      for (int i = 0; i < 2; ++i) pair[i][part] = load_wide((const float*)at + i * kLanes + part * kWide);
    }
}

// Multiplies M rows of x with a pair (lora.h) from a or b, and adds the products to the sums. `pair`: the index of the
// pair of values in x.
template <bool BF16, int M>
MM_INLINE void add_pair(const char* at, const Factor<BF16>* const (&x)[M], int pair, Sixteen (&sums)[M]) {
#if defined(__AVX512BF16__)
  if constexpr (BF16) {
    const __m512bh both = (__m512bh)load_as<__m512i>(at);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m512bh by = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x[m] + 2 * pair));
      sums[m].part[0] = (wide)_mm512_dpbf16_ps((__m512)sums[m].part[0], by, both);
    }
    return;
  }
#endif
  wide values[2][Sixteen::kParts];
  load_pair<BF16>(at, values);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const wide by = all((float)x[m][2 * pair + i]);
#pragma GCC unroll 2
      for (int part = 0; part < Sixteen::kParts; ++part)
        sums[m].part[part] = fused(values[i][part], by, sums[m].part[part]);
    }
}

inline int rank16(const mm_lora_part& part) { return (part.rank + kLanes - 1) / kLanes * kLanes; }

// Prefetches an adapter's data. A layer's data is contiguous: every a, then every b.
struct Ahead {
  const char *end, *next;

  Ahead(const mm_lora& lora, const mm_lora* after) {
    const mm_lora_part& last = lora.parts[lora.num_parts - 1];
    const int64_t pairs = (int64_t)(last.n + kLanes - 1) / kLanes * pairs_of(last.rank);
    end = (const char*)last.b + pairs * (lora.dtype == MM_BF16 ? kPairBytes<true> : kPairBytes<false>);
    next = after ? (const char*)after->parts[0].a : end;
  }

  MM_INLINE_MEMBER const char* place(const char* line) const { return line < end ? line : next + (line - end); }

  // Prefetches the data that follows `pair`, a pair that is multiplied with M rows.
  template <bool BF16, int M>
  MM_INLINE_MEMBER void fetch(const char* pair) const {
    if (M == 1 && !kFetchesForOne) return;
#pragma GCC unroll 2
    for (int line = 0; line < kPairBytes<BF16>; line += 64) {
      __builtin_prefetch(place(pair + line + kFarAhead), 0, 2);
      __builtin_prefetch(place(pair + line + kNearAhead), 0, 3);
    }
  }
};

// Rows with the same adapter, for one thread.
struct Chunk {
  const mm_lora* lora;
  const int32_t* rows;
  int count;
};

inline int sums_of_row(const mm_lora& lora) {
  int found = 0;
  for (int i = 0; i < lora.num_parts; ++i) found += rank16(lora.parts[i]);
  return found;
}

// Copies a row of x, padded with a zero if k is odd.
template <bool BF16>
void copy_row(const char* from, int k, Factor<BF16>* to) {
  if constexpr (BF16 && kDots) {
    memcpy(to, from, k * sizeof *to);
  } else {
    int t = 0;
    for (; t + kLanes <= k; t += kLanes) store_as(to + t, load_row<BF16>(from, t));
    if (t < k) store_part<false>((char*)to, t, load_part<BF16>(from, t, k - t), k - t);
  }
  if (k % 2) to[k] = 0;
}

// Stores 16 values of x a^T for a row. If b is multiplied as bfloat16 pairs, each value becomes two bfloat16: the
// rounded value and the remainder. The remainders come after all rounded values.
template <bool BF16>
MM_INLINE void put_sums(float* row, int rank16, int block, f16v sums) {
  if constexpr (BF16 && kDots) {
    const h16v high = narrow(sums), low = narrow(sums - widen(high));
    store_as((uint16_t*)row + block, high);
    store_as((uint16_t*)row + rank16 + block, low);
  } else {
    store_as(row + block, sums);
  }
}

// Multiplies M rows of x with 16 rows of a. The partial sums stay in registers.
template <bool BF16, int M>
MM_INLINE void shrink_block(const char* a, const Factor<BF16>* const (&x)[M], int pairs, const Ahead& ahead,
                            Sixteen (&all_sums)[M]) {
  constexpr int kAtOnce = M * kSums <= kInRegisters ? kSums : kInRegisters / M;
  Sixteen sums[kSums][M];
#pragma GCC unroll 4
  for (int first = 0; first < kSums; first += kAtOnce) {
    Sixteen found[kAtOnce][M] = {};
    int t = first;
    for (; t + kAtOnce <= pairs; t += kSums)
#pragma GCC unroll 4
      for (int i = 0; i < kAtOnce; ++i) {
        const char* at = a + (int64_t)(t + i) * kPairBytes<BF16>;
        ahead.fetch<BF16, M>(at);
        add_pair<BF16, M>(at, x, t + i, found[i]);
      }
    for (int i = 0; i < kAtOnce && t + i < pairs; ++i)
      add_pair<BF16, M>(a + (int64_t)(t + i) * kPairBytes<BF16>, x, t + i, found[i]);
#pragma GCC unroll 4
    for (int i = 0; i < kAtOnce; ++i)
      for (int m = 0; m < M; ++m) sums[first + i][m] = found[i][m];
  }
  for (int m = 0; m < M; ++m) all_sums[m] = (sums[0][m] + sums[1][m]) + (sums[2][m] + sums[3][m]);
}

// Multiplies x [count, k] with the part's a, into sums [count, rank16].
template <bool BF16, int M>
void shrink_rows(const mm_lora_part& part, int k, const Factor<BF16>* x, const Ahead& ahead, float* sums) {
  const int pairs = pairs_of(k), width = rank16(part);
  const Factor<BF16>* from[M];
  for (int m = 0; m < M; ++m) from[m] = x + (int64_t)m * pairs * 2;
  for (int block = 0; block < width; block += kLanes) {
    Sixteen found[M];
    const char* a = (const char*)part.a + (int64_t)block / kLanes * pairs * kPairBytes<BF16>;
    shrink_block<BF16, M>(a, from, pairs, ahead, found);
    for (int m = 0; m < M; ++m)
      put_sums<BF16>(sums + (int64_t)m * width, width, block, load_as<f16v>(&found[m]) * part.scale);
  }
}

template <bool BF16>
void shrink(const mm_lora_part& part, int k, const Factor<BF16>* x, int count, const Ahead& ahead, float* sums) {
  const int64_t width = rank16(part), step = pairs_of(k) * 2;
  int row = 0;
  for (; row + kRows <= count; row += kRows)
    shrink_rows<BF16, kRows>(part, k, x + row * step, ahead, sums + row * width);
  for (; row < count; ++row) shrink_rows<BF16, 1>(part, k, x + row * step, ahead, sums + row * width);
}

// The output y: bfloat16 if YBF16, else float32. The row stride is in elements.
struct Out {
  char* y;
  int64_t stride;
};

// Adds P panels of 16 output columns to M rows of y.
template <bool BF16, bool YBF16, int M, int P>
void expand_block(const mm_lora_part& part, const float* sums, const int32_t* rows, int panel, const Ahead& ahead,
                  const Out& out) {
  const int pairs = pairs_of(part.rank), width = rank16(part);
  const Factor<BF16>*high[M], *low[M];
  for (int m = 0; m < M; ++m) high[m] = (const Factor<BF16>*)(sums + m * width), low[m] = high[m] + width;
  Sixteen added[P][M] = {};
  for (int pair = 0; pair < pairs; ++pair)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const char* at = (const char*)part.b + ((int64_t)(panel + p) * pairs + pair) * kPairBytes<BF16>;
      ahead.fetch<BF16, M>(at);
      add_pair<BF16, M>(at, high, pair, added[p]);
      if constexpr (BF16 && kDots) add_pair<BF16, M>(at, low, pair, added[p]);
    }
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < P; ++p) {
      const int column = (panel + p) * kLanes, rest = part.n - column;
      const int64_t at = rows[m] * out.stride + part.offset + column;
      const f16v found = load_as<f16v>(&added[p][m]);
      store_part<YBF16>(out.y, at, load_part<YBF16>(out.y, at, rest) + found, rest);
    }
}

template <bool BF16, bool YBF16, int M>
void expand_rows(const mm_lora_part& part, const float* sums, const int32_t* rows, const Ahead& ahead, const Out& out) {
  constexpr int kAtOnce = M == 1 ? kPanels : kInRegisters / M > 1 ? 2 : 1;
  const int panels = (part.n + kLanes - 1) / kLanes;
  int panel = 0;
  for (; panel + kAtOnce <= panels; panel += kAtOnce)
    expand_block<BF16, YBF16, M, kAtOnce>(part, sums, rows, panel, ahead, out);
  for (; panel < panels; ++panel) expand_block<BF16, YBF16, M, 1>(part, sums, rows, panel, ahead, out);
}

template <bool BF16, bool YBF16>
void expand(const mm_lora_part& part, const float* sums, const int32_t* rows, int count, const Ahead& ahead,
            const Out& out) {
  int row = 0;
  for (; row + kRows <= count; row += kRows)
    expand_rows<BF16, YBF16, kRows>(part, sums + (int64_t)row * rank16(part), rows + row, ahead, out);
  for (; row < count; ++row)
    expand_rows<BF16, YBF16, 1>(part, sums + (int64_t)row * rank16(part), rows + row, ahead, out);
}

// All LoRA additions to one linear layer in a step. The chunks are independent.
struct Call {
  std::vector<Chunk> chunks;
  int64_t work = 0, room_of_thread = 0;  // room: floats per thread
  int dtype = MM_FP32;
  const int threads = most_threads();

  Call(const mm_lora_step* step, int linear) {
    const int share = (step->starts[step->num_groups] + threads - 1) / threads;
    const int most = std::min(kRowsOfChunk, (share + kRows - 1) / kRows * kRows);
    for (int group = 0; group < step->num_groups; ++group) {
      const mm_lora* lora = step->of[(int64_t)group * step->num_linears + linear];
      if (!lora) continue;
      dtype = lora->dtype;
      const int first = step->starts[group], rows = step->starts[group + 1] - first;
      for (int row = 0; row < rows; row += most)
        chunks.push_back({lora, step->rows + first + row, std::min(most, rows - row)});
      const int64_t of_row = pairs_of(lora->k) * 2 + sums_of_row(*lora);
      room_of_thread = std::max(room_of_thread, std::min(most, rows) * of_row);
      for (int i = 0; i < lora->num_parts; ++i)
        work += (int64_t)rows * lora->parts[i].rank * (lora->k + lora->parts[i].n);
    }
    room_of_thread = (room_of_thread + kLanes - 1) / kLanes * kLanes;
  }

  int64_t room() const { return room_of_thread * threads * 4; }
};

template <bool BF16, bool YBF16>
void add_chunk(const Chunk& chunk, const Chunk* after, const char* x, int64_t x_stride, const Out& out, float* room) {
  const mm_lora& lora = *chunk.lora;
  const Ahead ahead(lora, after ? after->lora : nullptr);
  const int64_t step = pairs_of(lora.k) * 2;
  float *sums = room + chunk.count * step, *to = sums;
  Factor<BF16>* rows = (Factor<BF16>*)room;
  for (int i = 0; i < chunk.count; ++i)
    copy_row<BF16>(x + chunk.rows[i] * x_stride * (BF16 ? 2 : 4), lora.k, rows + i * step);
  for (int i = 0; i < lora.num_parts; to += (int64_t)chunk.count * rank16(lora.parts[i]), ++i)
    shrink<BF16>(lora.parts[i], lora.k, rows, chunk.count, ahead, to);
  to = sums;
  for (int i = 0; i < lora.num_parts; to += (int64_t)chunk.count * rank16(lora.parts[i]), ++i)
    expand<BF16, YBF16>(lora.parts[i], to, chunk.rows, chunk.count, ahead, out);
}

template <bool BF16, bool YBF16>
void run(const Call& call, const char* x, int64_t x_stride, const Out& out, float* room) {
  const int count = (int)call.chunks.size();
#pragma omp parallel for schedule(dynamic) num_threads(call.threads) if (count > 1 && call.work >= kSmall)
  for (int i = 0; i < count; ++i) {
    const Chunk* after = i + num_threads() < count ? &call.chunks[i + num_threads()] : nullptr;
    add_chunk<BF16, YBF16>(call.chunks[i], after, x, x_stride, out, room + call.room_of_thread * this_thread());
  }
}

void add(const Call& call, const void* x, int64_t x_stride, void* y, int64_t y_stride, int y_dtype, float* room) {
  const auto chosen = call.dtype == MM_FP32 ? run<false, false>
                      : y_dtype == MM_BF16  ? run<true, true>
                                            : run<true, false>;
  chosen(call, (const char*)x, x_stride, {(char*)y, y_stride}, room);
}

}  // namespace
}  // namespace mm

extern "C" {

int32_t mm_lora_touches(const mm_lora_step* step, int32_t linear) {
  for (int group = 0; group < step->num_groups; ++group)
    if (step->of[(int64_t)group * step->num_linears + linear]) return 1;
  return 0;
}

int32_t mm_lora_add(const mm_lora_step* step, int32_t linear, const void* x, int64_t x_stride, void* y,
                    int64_t y_stride, int32_t y_dtype) {
  const mm::Call call(step, linear);
  if (call.chunks.empty()) return 0;
  float* room = (float*)mm::scratch_of_thread(call.room());
  if (!room) return 1;
  mm::add(call, x, x_stride, y, y_stride, y_dtype, room);
  return 0;
}

const float* mm_lora_sums(const mm_lora_step* step, int32_t linear, const void* x, int64_t x_stride, int32_t m,
                          int32_t n) {
  const mm::Call call(step, linear);
  float* sums = (float*)mm::scratch_of_thread((int64_t)m * n * 4 + call.room());
  if (!sums) return nullptr;
  memset(sums, 0, (size_t)m * n * 4);
  mm::add(call, x, x_stride, sums, n, MM_FP32, sums + (int64_t)m * n);
  return sums;
}

}  // extern "C"
