// Flash attention of many queries over one block of keys at a time.
//
// A Source provides the inputs. T is float, or uint16_t for bfloat16 bits. queries() and keys() are the numbers of
// queries and keys. A query attends to at least one key, in the range [first(query), seen(query)). The range's ends
// never decrease from one query to the next. query(i, room) and key(i, room) return T [head_dim]; they may copy the
// values to `room`. value(i) and out(query) return pointers without a copy. Keys before first(0) are not read.
// sink(query) is the score of the attention sink, if has_sinks().
#pragma once

#include <cmath>

#include "attention/tiles.h"

namespace mm {

template <class Tiles, class Source>
class Flash {
  using T = typename Source::T;
  using Query = typename Tiles::Query;
  static constexpr int kRows = Tiles::kRows;

 public:
  static int64_t bytes(int head_dim, int value_dim, int queries) {
    Carver carver = {nullptr};
    Flash(carver, head_dim, value_dim, queries);
    return carver.used;
  }

  static void run(const Source& source, void* scratch) {
    Carver carver = {(char*)scratch};
    Flash(carver, source.head_dim(), source.value_dim(), source.queries()).attend(source);
  }

 private:
  Flash(Carver& carver, int head_dim, int value_dim, int queries) : tiles_(carver, head_dim, value_dim) {
    const int64_t rows = round_up(queries, kRows);
    q_ = carver.take<Query>(rows * tiles_.q_width());
    sums_ = carver.take<float>(rows * tiles_.width());
    softmax_ = carver.take<RunningSoftmax>(rows);
    first_ = carver.take<int>(rows);
    seen_ = carver.take<int>(rows);
  }

  void attend(const Source& source) {
    const int queries = source.queries(), rows = (int)round_up(queries, kRows), keys = source.keys();
    const Scoring scoring = source.scoring();
    has_sinks_ = source.has_sinks();
    T room[kMaxHead];
    for (int r = 0; r < rows; r++) {  // the last tile is padded with copies of the last query
      const int query = r < queries ? r : queries - 1;
      tiles_.pack_query(source.query(query, room), q_ + (int64_t)r * tiles_.q_width());
      first_[r] = source.first(query);
      seen_[r] = source.seen(query);
      if (has_sinks_) softmax_[r] = {source.sink(query) / scoring.factor(), 1.0f};
    }
    tiles_.begin();
    for (int start = first_[0] / kKeyBlock * kKeyBlock; start < keys; start += kKeyBlock) {
      const int count = keys - start < kKeyBlock ? keys - start : kKeyBlock;
      pack(source, start, first_place(0, start), count);
      for (int r = 0; r < rows; r += kRows) {
        const int last = seen_[r + kRows - 1] - start, end = last < count ? last : count, from = first_place(r, start);
        if (from < end) tiles_.attend(tile(r), start, from, end, scoring);
      }
    }
    tiles_.end();
    for (int r = 0; r < queries; r++) store(source, r);
  }

  QueryTile<Query> tile(int r) const {
    return {q_ + (int64_t)r * tiles_.q_width(), sums_ + (int64_t)r * tiles_.width(), softmax_ + r, first_ + r,
            seen_ + r, has_sinks_};
  }

  // Returns the first key that query r needs in the block at `start`, relative to `start`, rounded down to kKeyStep.
  int first_place(int r, int start) const {
    return first_[r] > start ? (first_[r] - start) / kKeyStep * kKeyStep : 0;
  }

  void pack(const Source& source, int start, int from, int count) {
    T rooms[16][kMaxHead];
    const T *keys[16], *values[16];
    for (int at = from; at < round_up(count, Tiles::kPack); at += 16) {
      for (int r = 0; r < 16 && at + r < count; r++) {
        const int key = start + at + r, read = key < first_[0] ? first_[0] : key;
        keys[r] = source.key(read, rooms[r]);
        values[r] = source.value(read);
      }
      tiles_.pack(at, keys, values, count - at);
    }
  }

  void store(const Source& source, int r) const {
    const float *sums = sums_ + (int64_t)r * tiles_.width(), total = softmax_[r].total;
    T* __restrict to = source.out(r);
    for (int i = 0; i < source.value_dim(); i++)
      if constexpr (sizeof(T) == 2)
        to[i] = to_bf16(sums[i] / total);
      else
        to[i] = sums[i] / total;
    for (int i = source.value_dim(); i < source.head_dim(); i++) to[i] = 0;
  }

  Tiles tiles_;
  Query* q_;  // [rows, q_width]
  float* sums_;  // [rows, width]
  RunningSoftmax* softmax_;  // [rows]
  int *first_, *seen_;  // [rows]
  bool has_sinks_ = false;
};

}  // namespace mm
