// Low-rank additions, a chunk of a group's rows at a time: x a^T of all parts first, then what b makes of it.
#include "lora.h"

#include <algorithm>
#include <vector>

#include "linear.h"
#include "row_vec.h"
#include "scratch.h"
#include "threads.h"

namespace mm {
namespace {

constexpr int64_t kSmall = 100000;  // multiply-adds below which a second thread costs more than it gives
constexpr int kLanes = 16;
constexpr int kRows = 4;          // that share what is read of a and b
constexpr int kSums = 4;          // into which a row's sum over k is split, whatever the number of rows
#if defined(__AVX512F__)
constexpr int kInRegisters = 16;  // sums of 16 columns
#else
constexpr int kInRegisters = 4;
#endif
constexpr int kRowsOfChunk = 32;
constexpr int kFarAhead = 8192, kNearAhead = 2048;  // bytes, into the second cache and into the first

// 16 neighbours of a or b, and sums of them. With AVX2, which has 8 in a register, those of bfloat16 come as even ones
// and then odd ones, in half as many instructions; in_order() brings sums back.
struct Sixteen {
  static constexpr int kParts = kLanes / kWide;
  wide part[kParts];

  template <bool BF16>
  MM_INLINE_MEMBER static Sixteen load(const char* from, int64_t at) {
#if defined(__AVX512F__)
    return {load_row<BF16>(from, at)};
#else
    if constexpr (!BF16) return {load_row<false, wide>(from, at), load_row<false, wide>(from, at + kWide)};
    const __m256i pairs = load_as<__m256i>(from + at * 2);
    return {even_of(pairs), odd_of(pairs)};
#endif
  }

  template <bool BF16>
  MM_INLINE_MEMBER f16v in_order() const {
#if !defined(__AVX512F__)
    const __m256 low = _mm256_unpacklo_ps(part[0], part[1]), high = _mm256_unpackhi_ps(part[0], part[1]);
    const __m256 apart[2] = {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
    if constexpr (BF16) return load_as<f16v>(apart);
#endif
    return load_as<f16v>(part);
  }

  MM_INLINE_MEMBER void add(const Sixteen& from, float by) {
    for (int i = 0; i < kParts; ++i) part[i] = fused(from.part[i], all(by), part[i]);
  }
  MM_INLINE_MEMBER Sixteen operator+(const Sixteen& other) const {
    Sixteen sum = *this;
    for (int i = 0; i < kParts; ++i) sum.part[i] += other.part[i];
    return sum;
  }
};

inline int rank16(const mm_lora_part& part) { return (part.rank + kLanes - 1) / kLanes * kLanes; }

// What an adapter holds for a layer is one piece of memory, all a and then all b; behind its end comes the next one's.
struct Ahead {
  const char *end, *next;

  Ahead(const mm_lora& lora, const mm_lora* after) {
    const mm_lora_part& last = lora.parts[lora.num_parts - 1];
    const int64_t panels = (last.n + kLanes - 1) / kLanes;
    end = (const char*)last.b + panels * last.rank * kLanes * (lora.dtype == MM_BF16 ? 2 : 4);
    next = after ? (const char*)after->parts[0].a : end;
  }

  MM_INLINE_MEMBER const char* place(const char* line) const { return line < end ? line : next + (line - end); }

  MM_INLINE_MEMBER void fetch(const char* at) const {
    __builtin_prefetch(place(at + kFarAhead), 0, 2);
    __builtin_prefetch(place(at + kNearAhead), 0, 3);
  }
};

// Rows of a group, which one thread computes from x to y.
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

template <bool BF16>
void widen_row(const char* from, int k, float* to) {
  int t = 0;
  for (; t + kLanes <= k; t += kLanes) store_as(to + t, load_row<BF16>(from, t));
  if (t < k) store_part<false>((char*)to, t, load_part<BF16>(from, t, k - t), k - t);
}

// Sums of M rows of x by 16 rows of a, as many of a row's at a time as stay in registers.
template <bool BF16, int M>
void shrink_block(const char* a, const float* const* x, int k, float scale, const Ahead& ahead, float* const* to) {
  constexpr int kAtOnce = M * kSums <= kInRegisters ? kSums : kInRegisters / M, line = kLanes * (BF16 ? 2 : 4);
  Sixteen sums[M][kSums];
#pragma GCC unroll 4
  for (int first = 0; first < kSums; first += kAtOnce) {
    Sixteen found[M][kAtOnce] = {};
    int t = first;
    for (; t + kAtOnce <= k; t += kSums) {
      const char* step = a + (int64_t)t * line;
#pragma GCC unroll 4
      for (int i = 0; i < kAtOnce; ++i) {
        if ((first + i) * line % 64 == 0) ahead.fetch(step + i * line);
        const Sixteen v = Sixteen::load<BF16>(step, (int64_t)i * kLanes);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) found[m][i].add(v, x[m][t + i]);
      }
    }
    for (int i = 0; i < kAtOnce && t + i < k; ++i) {
      const Sixteen v = Sixteen::load<BF16>(a, (int64_t)(t + i) * kLanes);
      for (int m = 0; m < M; ++m) found[m][i].add(v, x[m][t + i]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
      for (int i = 0; i < kAtOnce; ++i) sums[m][first + i] = found[m][i];
  }
  for (int m = 0; m < M; ++m) {
    const Sixteen sum = (sums[m][0] + sums[m][1]) + (sums[m][2] + sums[m][3]);
    store_as(to[m], sum.template in_order<BF16>() * scale);
  }
}

// x [count, k] by the part's a, into sums [count, rank16].
template <bool BF16, int M>
void shrink_rows(const mm_lora_part& part, int k, const float* x, const Ahead& ahead, float* sums) {
  const float* from[M];
  for (int m = 0; m < M; ++m) from[m] = x + (int64_t)m * k;
  for (int block = 0; block < rank16(part); block += kLanes) {
    float* to[M];
    for (int m = 0; m < M; ++m) to[m] = sums + (int64_t)m * rank16(part) + block;
    const int64_t at = (int64_t)block * k * (BF16 ? 2 : 4);
    shrink_block<BF16, M>((const char*)part.a + at, from, k, part.scale, ahead, to);
  }
}

template <bool BF16>
void shrink(const mm_lora_part& part, int k, const float* x, int count, const Ahead& ahead, float* sums) {
  int row = 0;
  for (; row + kRows <= count; row += kRows)
    shrink_rows<BF16, kRows>(part, k, x + (int64_t)row * k, ahead, sums + (int64_t)row * rank16(part));
  for (; row < count; ++row)
    shrink_rows<BF16, 1>(part, k, x + (int64_t)row * k, ahead, sums + (int64_t)row * rank16(part));
}

// y of a call: of YBF16 or float32, a stride in elements between rows.
struct Out {
  char* y;
  int64_t stride;
};

// Adds P panels of 16 columns to M rows.
template <bool BF16, bool YBF16, int M, int P>
void expand_block(const mm_lora_part& part, const float* sums, const int32_t* rows, int panel, const Ahead& ahead,
                  const Out& out) {
  Sixteen added[M][P] = {};
  for (int r = 0; r < part.rank; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const int64_t at = ((int64_t)(panel + p) * part.rank + r) * kLanes;
      ahead.fetch((const char*)part.b + at * (BF16 ? 2 : 4));
      const Sixteen v = Sixteen::load<BF16>((const char*)part.b, at);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) added[m][p].add(v, sums[m * rank16(part) + r]);
    }
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < P; ++p) {
      const int column = (panel + p) * kLanes, rest = part.n - column;
      const int64_t at = rows[m] * out.stride + part.offset + column;
      const f16v found = added[m][p].template in_order<BF16>();
      store_part<YBF16>(out.y, at, load_part<YBF16>(out.y, at, rest) + found, rest);
    }
}

template <bool BF16, bool YBF16, int M>
void expand_rows(const mm_lora_part& part, const float* sums, const int32_t* rows, const Ahead& ahead, const Out& out) {
  constexpr int kAtOnce = M == 1 ? 4 : kInRegisters / M > 1 ? 2 : 1;
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

// Everything of one linear layer that is added in a step. Chunks need nothing of each other, so that threads meet
// only behind the last one, and what an adapter holds for the layer is read in address order.
struct Call {
  std::vector<Chunk> chunks;
  int64_t work = 0, room_of_thread = 0;  // room: floats
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
      room_of_thread = std::max(room_of_thread, (int64_t)std::min(most, rows) * (lora->k + sums_of_row(*lora)));
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
  float* sums = room + (int64_t)chunk.count * lora.k;
  for (int i = 0; i < chunk.count; ++i)
    widen_row<BF16>(x + chunk.rows[i] * x_stride * (BF16 ? 2 : 4), lora.k, room + (int64_t)i * lora.k);
  float* to = sums;
  for (int i = 0; i < lora.num_parts; to += (int64_t)chunk.count * rank16(lora.parts[i]), ++i)
    shrink<BF16>(lora.parts[i], lora.k, room, chunk.count, ahead, to);
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
  const auto chosen = call.dtype == MM_FP32 ? run<false, false> : y_dtype == MM_BF16 ? run<true, true> : run<true, false>;
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
